"""The plots of a simulated step: its stages, where its time goes, and a few layers of it rank by rank."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from foreroute.report.canvas import INCHES, Caption, Key, Plot, panel, top_down
from foreroute.report.plan_rows import step_seconds, step_time
from foreroute.report.simulation_rows import compared

if TYPE_CHECKING:
    from foreroute.simulate import SimulationRecord

PALE, DARK, INK = "#9aa5b1", "#333333", "#3b4550"
STAGE_COLOURS = (DARK, "#CC79A7", "#56B4E9", "#0072B2", "#009E73", "#E69F00")
PART_COLOURS = ("#0072B2", "#D55E00", "#009E73", PALE, "#CC79A7", "#E69F00", DARK, "#56B4E9")
BAR_INCHES = 0.34
LABEL_WIDTH = 21


def by_stage(record: SimulationRecord) -> Plot:
    """The whole step of every method."""
    from foreroute.simulate.records import STAGES

    static = record["static"].stages
    forced_balance_s = record.forced_balance_s + static.reduction + static.optimizer
    caption = Caption(
        title="The step by method",
        sentence="From the end of the rollout to new weights, stage after stage. Planning is only what the recompute "
        f"waits for. The line is the same step under forced balance, {step_time(forced_balance_s)}.",
        x_label="seconds, modelled",
        y_label="",
        absent="",
    )
    bars = [(method.label, tuple(method.stages)) for method in record.methods]
    return _stacked(caption, bars, STAGES, STAGE_COLOURS, height=_height(len(bars)), line=forced_balance_s)


def by_part(record: SimulationRecord) -> Plot:
    """Recompute and update of the methods that matter, by what they are spent on."""
    from foreroute.simulate.engine import PARTS

    caption = Caption(
        title="What recompute and update are spent on",
        sentence="Of the slowest expert-parallel group, in its last pipeline stage. All-to-alls and experts last as "
        "long as their slowest rank; exposed transfers are waits for weights and gradients that move. "
        "Waiting for the plan delays the recompute and counts as planning elsewhere.",
        x_label="seconds, modelled",
        y_label="",
        absent="",
    )
    methods = (record["static"], *compared(record))
    bars = [
        (method.label, [parts[part] for part in PARTS])
        for stage in ("recompute", "update")
        for method in methods
        for parts in [method.recompute_parts if stage == "recompute" else method.update_parts]
    ]
    groups = {0: "recompute", len(methods): "update"}
    return _stacked(caption, bars, PARTS, PART_COLOURS, groups=groups, height=_height(len(record.methods)))


def _height(num_bars: int) -> float:
    return 0.8 + BAR_INCHES * num_bars


def _stacked(
    caption: Caption,
    bars: Sequence[tuple[str, Sequence[float]]],
    names: Sequence[str],
    colours: Sequence[str],
    *,
    height: float,
    line: float | None = None,
    groups: Mapping[int, str] | None = None,
) -> Plot:
    """Bars of the same parts; parts that no bar has are left out.

    Args:
        caption: words.
        bars: label and seconds of each part, from the top.
        names: of the parts.
        colours: of the parts.
        height: of the picture in inches, at least.
        line: seconds at which a line is drawn.
        groups: headings over some bars, by position.
    """
    widths_BX = np.array([seconds for _, seconds in bars], np.float64)
    totals_B, headings = widths_BX.sum(axis=1), groups or {}
    shown = [x for x in range(len(names)) if widths_BX[:, x].max() > 1e-3 * totals_B.max()]
    places_B = np.array([place + sum(first <= place for first in headings) for place in range(len(bars))], np.float64)

    def draw(axes: Any) -> None:
        left_B = np.zeros(len(bars))
        for x in shown:
            axes.barh(places_B, widths_BX[:, x], left=left_B, color=colours[x], height=0.66)
            left_B += widths_BX[:, x]
        if line is not None:
            axes.axvline(line, color=DARK, linewidth=1.2, linestyle=(0, (4, 2)))
        for place, total in zip(places_B, totals_B, strict=True):
            axes.annotate(
                step_seconds(total), (total, place), xytext=(5, 0), textcoords="offset points", va="center",
                fontsize=9.5, color=INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
            )  # fmt: skip
        for first, heading in headings.items():
            axes.text(0, places_B[first] - 0.95, heading, va="center", fontsize=10.5, fontweight="bold", color=INK)
        axes.set_yticks(places_B, [textwrap.fill(label, LABEL_WIDTH) for label, _ in bars], fontsize=9.5)
        axes.set_xlim(0, 1.14 * max(float(totals_B.max()), line or 0.0))
        axes.set_ylim(-0.6, places_B[-1] + 0.6)
        top_down(axes)

    said = ", ".join(f"{label} {step_time(total)}" for (label, _), total in zip(bars, totals_B, strict=True))
    keys = [Key(names[x], colours[x]) for x in shown]
    inches = (INCHES[0], max(height, _height(len(bars) + len(headings))))
    return panel(caption, draw, f"{caption.title}. {said}.", keys, inches)
