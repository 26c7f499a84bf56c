"""How well measured steps are predicted, when rates were fitted to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foreroute.report.canvas import COLOURS, Caption, Plot, panel
from foreroute.report.plan_rows import step_time

if TYPE_CHECKING:
    from foreroute.simulate.fit import FitRecord


def predictions(found: FitRecord) -> Plot:
    """Predicted against measured seconds."""
    caption = Caption(
        title="Predicted and measured",
        sentence="Seconds of every measured stage, with the fitted rates. On the line both are the same.",
        x_label="seconds, measured",
        y_label="seconds, predicted",
        absent="",
    )
    most = 1.05 * max(*found.measured_s, *found.predicted_s)

    def draw(axes: Any) -> None:
        axes.plot([0, most], [0, most], color="#8a94a0", linewidth=0.9)
        axes.plot(found.measured_s, found.predicted_s, color=COLOURS[0], marker="o", markersize=5, linestyle="")
        axes.set_xlim(0, most)
        axes.set_ylim(0, most)

    points = zip(found.names, found.measured_s, found.predicted_s, strict=True)
    said = "; ".join(f"{name}: {step_time(a)} measured, {step_time(b)} predicted" for name, a, b in points)
    return panel(caption, draw, f"{caption.title}. {said}.")
