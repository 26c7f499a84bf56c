"""The plots summed over a run: disagreement by layer, differing layers per token, top-k margins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.report.canvas import (
    TALL_INCHES,
    Caption,
    Plot,
    Series,
    layer_label,
    percent_axis,
    plot,
    whole_ticks,
)
from foreroute.report.records import SIDES, Margins, Mismatch, Run


def by_layer(runs: Sequence[Run]) -> Plot:
    caption = Caption(
        title="Routing disagreement by layer",
        sentence="Share of tokens whose expert set differs in a layer, averaged over the measured steps.",
        x_label=layer_label(()),
        y_label="share of tokens",
        absent="No routing disagreement by layer was recorded (differing_share_by_layer).",
    )
    series = []
    for position, side, found in _sides(runs, "differing_share_by_layer"):
        shares_L = np.asarray(np.mean(found, axis=0), np.float64)
        series.append(Series(position, side, np.arange(len(shares_L), dtype=np.float64), shares_L))

    def draw(axes: Any) -> None:
        for line in series:
            axes.plot(line.x, line.y, **line.look)
        axes.xaxis.set_major_locator(whole_ticks(8))
        percent_axis(axes)

    return plot(caption, runs, series, draw)


def differing_layers(runs: Sequence[Run]) -> Plot:
    caption = Caption(
        title="Differing layers per token",
        sentence="Share of tokens by the number of layers in which their expert sets differ; at 0 all layers agree.",
        x_label="layers that differ",
        y_label="share of tokens",
        absent="No histogram of differing layers was recorded (differing_layers_histogram).",
    )
    series = []
    for position, side, found in _sides(runs, "differing_layers_histogram"):
        shares = _normalised(np.sum(found, axis=0))
        series.append(Series(position, side, np.arange(len(shares) + 1, dtype=np.float64) - 0.5, shares))

    def draw(axes: Any) -> None:
        _stairs(axes, series)
        axes.xaxis.set_major_locator(whole_ticks(8))
        percent_axis(axes)

    return plot(caption, runs, series, draw)


def margins(runs: Sequence[Run]) -> Plot:
    caption = Caption(
        title="Top-k margins",
        sentence="Gap between the last selected and the first rejected expert's score; the further left, "
        "the smaller the numerical difference that changes the selection.",
        x_label="score gap (logarithmic)",
        y_label="share of routing decisions",
        absent="No top-k margins were recorded (margins).",
    )
    series = []
    for position, run in enumerate(runs):
        found = [step.margins for step in run.steps if step.margins and step.margins.counts_LB]
        if found:
            series.append(Series(position, None, 10 ** np.array(found[0].log10_edges), _share_by_bin(found)))

    def draw(axes: Any) -> None:
        _stairs(axes, series)
        axes.set_xscale("log")
        percent_axis(axes)

    return plot(caption, runs, series, draw, TALL_INCHES)


def _sides(runs: Sequence[Run], measure: str) -> list[tuple[int, Any, list[tuple[float, ...]]]]:
    """(run, side, one tuple per step) for every run and side that recorded `measure`."""

    def values(mismatch: Mismatch) -> tuple[float, ...]:
        return tuple(getattr(mismatch, measure))

    rows = [
        (position, side, [values(step.mismatch[side]) for step in run.steps_to_compare(side)])
        for position, run in enumerate(runs)
        for side in SIDES
    ]
    return [(position, side, [row for row in found if row]) for position, side, found in rows if any(found)]


def _share_by_bin(found: Sequence[Margins]) -> NDArray[np.float64]:
    return _normalised(np.sum([np.sum(margins.counts_LB, axis=0) for margins in found], axis=0))


def _normalised(counts: NDArray[Any]) -> NDArray[np.float64]:
    return np.asarray(counts / max(counts.sum(), 1), np.float64)


def _stairs(axes: Any, series: Sequence[Series]) -> None:
    alone = len({line.run for line in series}) == 1  # the fills of several runs mix into a colour of none
    for line in series:
        look = {"color": line.look["color"], "linestyle": line.look["linestyle"], "linewidth": 1.7}
        if alone and line.side != "replayed":
            axes.stairs(line.y, line.x, fill=True, color=look["color"], alpha=0.12)
        axes.stairs(line.y, line.x, baseline=None, **look)
