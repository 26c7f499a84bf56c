"""The plots of how far trainer and rollout engine are apart: over a run, summed over it, and in a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreroute.mismatch import LOG10_EDGES
from foreroute.records import SIDES, Run
from foreroute.report.figure import (
    INK,
    SIDE_COLOURS,
    Caption,
    Key,
    Plot,
    Series,
    card,
    card_of_runs,
    integer_ticks,
    layer_label,
    new_axes,
    number_layers,
    percent_axis,
    percent_ticks,
    plot_lines,
    series_by_side,
    style_of,
)
from foreroute.report.run_rows import WINDOW

if TYPE_CHECKING:
    from foreroute.doctor import Measures
    from foreroute.trace import RoutedLayer


def mismatch_plots(runs: Sequence[Run]) -> list[Plot]:
    """Over the steps of the runs, then summed over them."""
    shares = [
        plot_lines(_DISAGREEMENT, runs, series_by_side(runs, "differing_share"), percent_axis, smooth=True),
        plot_lines(_F2, runs, series_by_side(runs, "f2"), percent_axis, smooth=True),
    ]
    return [_k3(runs), *shares, _disagreement_by_layer(runs), _margins(runs)]


def diagnosis_plots(measures: Measures) -> list[Plot]:
    """Where in depth, and where in the sequence; a card without data says why."""
    return [_by_layer(measures), _by_position(measures)]


def _k3(runs: Sequence[Run]) -> Plot:
    series = series_by_side(runs, "k3")
    values = np.concatenate([line.y for line in series]) if series else np.zeros(0)
    positive = values[np.isfinite(values) & (values > 0)]
    # The power of ten below the smallest value: the axis is logarithmic down to there.
    floor = 10.0 ** np.floor(np.log10(positive.min())) if positive.size else None
    floor_text = f"1e{np.log10(floor):.0f}" if floor else ""
    zeros = bool((values <= 0).any())
    caption = Caption(
        title="Mismatch of trainer and rollout engine (k3)",
        sentence=f"k3 estimates KL(rollout engine || trainer) on the sampled response tokens. {SMOOTHED}"
        + (f" Logarithmic above {floor_text}, linear below it so that zero can be shown." if floor and zeros else ""),
        y_label="k3, nats per response token",
    )

    def finish(axes: Any) -> None:
        if floor and zeros:
            axes.set_yscale("symlog", linthresh=floor, linscale=0.4)
        elif floor:
            axes.set_yscale("log")
        if zeros:  # a line of exact zeros would vanish in the axis
            axes.set_ylim(bottom=-(floor or 1.0) * 0.25)

    return plot_lines(caption, runs, series, finish, smooth=True)


def _disagreement_by_layer(runs: Sequence[Run]) -> Plot:
    series = []
    for position, side in product(range(len(runs)), SIDES):
        measured = (step.mismatch[side] for step in runs[position].steps_to_compare(side))
        if found := [each.differing_share_by_layer for each in measured if each.differing_share_by_layer]:
            shares_L = np.asarray(np.mean(found, axis=0), np.float64)
            series.append(Series(position, side, np.arange(len(shares_L), dtype=np.float64), shares_L))
    layers = layers_of(runs, [(line.run, len(line.x)) for line in series])

    def finish(axes: Any) -> None:
        number_layers(axes.xaxis, layers)
        percent_axis(axes)

    return plot_lines(replace(_BY_LAYER, x_label=layer_label(layers)), runs, series, finish)


def layers_of(runs: Sequence[Run], shown: Sequence[tuple[int, int]]) -> tuple[RoutedLayer, ...]:
    """The layers of these runs, each given with how many it recorded; none where they are unknown, or not the same."""
    tables = {runs[position].layers for position, _ in shown}
    same = tables.pop() if len(tables) == 1 else ()
    return same if all(recorded == len(same) for _, recorded in shown) else ()


def _margins(runs: Sequence[Run]) -> Plot:
    series = []
    for position, run in enumerate(runs):
        found = [step.margins_LB for step in run.steps if step.margins_LB]
        if found:
            series.append(Series(position, None, 10**LOG10_EDGES, _share_by_bin(found)))
    axes = new_axes()
    _stairs(axes, runs, series)
    axes.set_xscale("log")
    percent_axis(axes)
    return card_of_runs(_MARGINS, axes, runs, series)


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
    axes = new_axes()
    layers = np.arange(len(shares_L))
    axes.bar(layers, shares_L, color=SIDE_COLOURS["native"], alpha=0.75, width=0.7)
    axes.plot(layers, first_L, color=INK, marker="o", markersize=3.5)
    axes.set_ylim(0, max(1.1 * float(shares_L.max()), 1e-3))
    number_layers(axes.xaxis, measures.layers)
    percent_ticks(axes.yaxis)
    by_layer = zip(measures.layers, shares_L, strict=True)
    said = f"Tokens that differ: {', '.join(f'{layer} {share:.1%}' for layer, share in by_layer)}"
    return card(caption, axes, said, [Key("differs", SIDE_COLOURS["native"]), Key("differs first", INK)])


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
    axes = new_axes()
    axes.plot(np.arange(len(overlap_T)), overlap_T, color=SIDE_COLOURS["native"])
    lowest = float(np.nanmin(overlap_T))
    room = 0.06 * max(1 - lowest, 0.05)
    axes.set_ylim(max(0.0, lowest - room), 1 + room)
    axes.set_yticks([tick for tick in axes.get_yticks() if max(0.0, lowest - room) <= tick <= 1])
    axes.xaxis.set_major_locator(integer_ticks(8))
    percent_ticks(axes.yaxis)
    said = f"Common experts from {np.nanmin(overlap_T):.1%} to {np.nanmax(overlap_T):.1%}"
    return card(caption, axes, said)


def _share_by_bin(found: Sequence[list[list[int]]]) -> NDArray[np.float64]:
    counts_B = np.sum([np.sum(counts_LB, axis=0) for counts_LB in found], axis=0)
    return np.asarray(counts_B / max(counts_B.sum(), 1), np.float64)


def _stairs(axes: Any, runs: Sequence[Run], series: Sequence[Series]) -> None:
    alone = len({line.run for line in series}) == 1  # the fills of several runs mix into a colour of none
    for line in series:
        look = style_of(runs, line)
        style = {"color": look["color"], "linestyle": look["linestyle"], "linewidth": 1.7}
        if alone and line.side != "replayed":
            axes.stairs(line.y, line.x, fill=True, color=style["color"], alpha=0.12)
        axes.stairs(line.y, line.x, baseline=None, **style)


SMOOTHED = f"Thick: mean of the last {WINDOW} steps."
_F2 = Caption(
    title="Tokens far apart, F(2)",
    sentence="Share of response tokens whose probabilities in trainer and rollout engine differ more than twofold. "
    + SMOOTHED,
    y_label="share of response tokens",
)
_DISAGREEMENT = Caption(
    title="Routing disagreement",
    sentence="Share of routing decisions in which trainer and rollout engine use different sets of experts. "
    + SMOOTHED,
    y_label="share of routing decisions",
)
_BY_LAYER = Caption(
    title="Routing disagreement by layer",
    sentence="Share of tokens whose expert set differs in a layer, averaged over the measured steps.",
    y_label="share of tokens",
)
_MARGINS = Caption(
    title="Top-k margins",
    sentence="Gap between the last selected and the first rejected expert's score; the further left, the smaller the "
    "numerical difference that changes the selection.",
    x_label="score gap (logarithmic)",
    y_label="share of routing decisions",
)
