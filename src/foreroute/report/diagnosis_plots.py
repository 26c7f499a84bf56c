"""The plots of a diagnosis: where in depth, and where in the sequence, engine and trainer part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from foreroute.doctor import Measures
from foreroute.report.canvas import COLOURS, Caption, Plot, layer_label, number_layers, picture, whole_ticks


def diagnosis_plots(measures: Measures) -> list[Plot]:
    """Two cards; a card without data says why."""
    return [_by_layer(measures), _by_position(measures)]


def _by_layer(measures: Measures) -> Plot:
    caption = Caption(
        title="Where in depth",
        sentence="Share of tokens whose expert set differs in a layer (bars), and of those whose first differing layer "
        "it is (line). Without replay.",
        x_label=layer_label(measures.layers),
        y_label="share of tokens",
        absent="Routes of the trainer and of the engine are needed for this; one of them was not given.",
    )
    routes = measures.routes
    if routes is None or not routes.rows:
        return Plot(caption=caption)
    shares_L, first_L = routes.differing_share_L, routes.first_differing_L / routes.rows

    def draw(axes: Any) -> None:
        layers = np.arange(len(shares_L))
        axes.bar(layers, shares_L, color=COLOURS[0], alpha=0.75, width=0.7, label="differs")
        axes.plot(layers, first_L, color=COLOURS[1], marker="o", markersize=3.5, label="differs first")
        axes.set_ylim(0, max(1.25 * float(shares_L.max()), 1e-3))
        axes.legend(frameon=False, fontsize=10, loc="upper left", ncols=2)
        number_layers(axes.xaxis, measures.layers)

    by_layer = zip(measures.layers, shares_L, strict=True)
    text = f"{caption.title}. Tokens that differ: {', '.join(f'{layer} {share:.1%}' for layer, share in by_layer)}."
    return _picture(caption, draw, text)


def _by_position(measures: Measures) -> Plot:
    caption = Caption(
        title="Where in the sequence",
        sentence="Mean share of a token's experts that engine and trainer both picked, by position. A step "
        "points to a defect; noise is natural.",
        x_label="position in the sequence",
        y_label="common experts",
        absent="Routes of the trainer and of the engine are needed for this; one of them was not given.",
    )
    explained = measures.explanation
    if explained is None or not np.isfinite(explained.overlap_by_position_T).any():
        return Plot(caption=caption)
    overlap_T = explained.overlap_by_position_T

    def draw(axes: Any) -> None:
        axes.plot(np.arange(len(overlap_T)), overlap_T, color=COLOURS[0])
        lowest = float(np.nanmin(overlap_T))
        room = 0.06 * max(1 - lowest, 0.05)
        axes.set_ylim(max(0.0, lowest - room), 1 + room)
        axes.set_yticks([tick for tick in axes.get_yticks() if max(0.0, lowest - room) <= tick <= 1])
        axes.xaxis.set_major_locator(whole_ticks(8))

    text = f"{caption.title}. Common experts from {np.nanmin(overlap_T):.1%} to {np.nanmax(overlap_T):.1%}."
    return _picture(caption, draw, text)


def _picture(caption: Caption, draw: Callable[[Any], None], text: str) -> Plot:
    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        draw(axes)
        axes.set_xlabel(caption.x_label)
        axes.set_ylabel(caption.y_label)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None, symbol=" %"))

    return picture(caption, fill, text)
