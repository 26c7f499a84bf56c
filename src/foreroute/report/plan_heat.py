"""The heat maps of a plan: two panels, before and after, on one colour scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from foreroute.report.canvas import Caption, Plot, layer_label, number_layers, picture, ticks_above_one, whole_ticks
from foreroute.report.plan_rows import over_mean

if TYPE_CHECKING:
    from foreroute.costs.figures import StepSummary
    from foreroute.trace import RoutedLayer

HEAT_INCHES = (5.0, 4.2)
TITLES = ("without balancing", "under the plan")


def ranks(survey: StepSummary, layers: Sequence[RoutedLayer]) -> Plot:
    """Load of every rank in every micro-step, in the layer that is the most uneven."""
    layer = survey.most_uneven_layer
    named = str(layers[layer]) if layers else f"routed layer {layer}, counted from 0"
    caption = Caption(
        title="Load of every rank",
        sentence=f"Assignments of each rank over the mean of its cell in {named}, the most uneven layer. "
        "Each column is a cell, which lasts as long as its slowest rank.",
        x_label="micro-step",
        y_label="rank",
        absent="",
    )
    sides = (survey.before.over_mean_MLG[:, layer].T, survey.after.over_mean_MLG[:, layer].T)
    return _panels(caption, sides, least=0.0)


def cells(survey: StepSummary, layers: Sequence[RoutedLayer]) -> Plot:
    """The slowest rank of every cell."""
    caption = Caption(
        title="The slowest rank of every cell",
        sentence="Its load over the mean of the cell, in all layers and micro-steps.",
        x_label="micro-step",
        y_label=layer_label(layers),
        absent="",
    )
    sides = (survey.before.imbalance_ML.T, survey.after.imbalance_ML.T)
    return _panels(caption, sides, least=None, layers=layers)


def _panels(
    caption: Caption,
    sides: tuple[NDArray[np.float64], ...],
    *,
    least: float | None,
    layers: Sequence[RoutedLayer] = (),
) -> Plot:
    """Colours leave white at 1, perfect balance; blue is below it, red above."""
    most = max(*(float(side.max()) for side in sides), 1.05)
    norm = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=most)
    colours = matplotlib.colormaps["RdBu_r"]

    def fill(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, side, title in zip(panels, sides, TITLES, strict=True):
            image = axes.imshow(side, norm=norm, cmap=colours, aspect="auto", interpolation="nearest")
            axes.set_title(title, loc="left", fontsize=10.5, color="#3b4550", pad=4)
            axes.set_xlabel(caption.x_label)
            axes.grid(visible=False)
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_locator(whole_ticks(5))
            if layers:
                number_layers(axes.yaxis, layers)
        panels[0].set_ylabel(caption.y_label)
        bar = figure.colorbar(image, ax=panels, location="bottom", fraction=0.05, pad=0.02, aspect=40)
        bar.set_label("over mean")
        bar.outline.set_visible(False)
        low = [] if least is None else [0.0, 0.5]
        bar.set_ticks([*low, 1.0, *ticks_above_one(most)])
        if least is None:
            bar.ax.set_xlim(1.0, most)

    spans = "; ".join(f"{t} {over_mean(s.min())} to {over_mean(s.max())}" for t, s in zip(TITLES, sides, strict=True))
    return picture(caption, fill, f"{caption.title}. {spans}.", HEAT_INCHES)
