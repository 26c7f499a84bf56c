"""The plots of how far trainer and rollout engine are apart: over a run, summed over it, and in a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreroute.records import SIDES, MarginsRecord, Run
from foreroute.report.figure import (
    INK,
    SIDE_COLOURS,
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
from foreroute.report.page import Key, Plot, caption
from foreroute.report.run_tables import WINDOW

if TYPE_CHECKING:
    from foreroute.doctor import Measures
    from foreroute.trace import RoutedLayer


def mismatch_plots(runs: Sequence[Run]) -> list[Plot]:
    """Over the steps of the runs, then summed over them."""
    shares = [
        plot_lines(caption(name, window=WINDOW), runs, series_by_side(runs, measure), percent_axis, smooth=True)
        for name, measure in (("differing", "differing_share"), ("f2", "f2"))
    ]
    return [_k3(runs), *shares, _disagreement_by_layer(runs), _margins(runs)]


def diagnosis_plots(measures: Measures) -> list[Plot]:
    """Where in depth, and where in the sequence; a card without data says why."""
    return [_by_layer(measures), _by_position(measures)]


def _k3(runs: Sequence[Run]) -> Plot:
    series = series_by_side(runs, "k3")
    positive = [value for line in series for value in line.y if 0 < value < np.inf]
    # The power of ten below the smallest value: the axis is logarithmic down to there, and linear to zero.
    floor = 10.0 ** np.floor(np.log10(min(positive, default=1.0)))

    def finish(axes: Any) -> None:
        axes.set_yscale("symlog", linthresh=floor, linscale=0.4)
        axes.set_ylim(bottom=-0.25 * floor)  # a line of exact zeros would vanish in the axis

    return plot_lines(caption("k3", window=WINDOW, floor=f"{floor:.0e}"), runs, series, finish, smooth=True)


def _disagreement_by_layer(runs: Sequence[Run]) -> Plot:
    series = []
    for position, side in product(range(len(runs)), SIDES):
        measured = (step["mismatch"][side] for step in runs[position].steps_to_compare(side))
        if found := [each["differing_share_by_layer"] for each in measured if each.get("differing_share_by_layer")]:
            shares_L = np.asarray(np.mean(found, axis=0), np.float64)
            series.append(Series(position, side, np.arange(len(shares_L), dtype=np.float64), shares_L))
    layers = layers_of(runs, [(line.run, len(line.x)) for line in series])

    def finish(axes: Any) -> None:
        number_layers(axes.xaxis, layers)
        percent_axis(axes)

    return plot_lines(replace(caption("differing_by_layer"), x_label=layer_label(layers)), runs, series, finish)


def layers_of(runs: Sequence[Run], shown: Sequence[tuple[int, int]]) -> tuple[RoutedLayer, ...]:
    """The layers of these runs, each given with how many it recorded; none where they are unknown, or not the same."""
    tables = {runs[position].layers for position, _ in shown}
    same = tables.pop() if len(tables) == 1 else ()
    return same if all(recorded == len(same) for _, recorded in shown) else ()


def _margins(runs: Sequence[Run]) -> Plot:
    series = []
    for position, run in enumerate(runs):
        found = [margins for step in run.steps if (margins := step.get("margins")) and margins["counts_LB"]]
        if found:
            series.append(Series(position, None, 10 ** np.array(found[0]["log10_edges"]), _share_by_bin(found)))
    axes = new_axes()
    for line in series:
        look = style_of(runs, line)
        axes.stairs(line.y, line.x, baseline=None, color=look["color"], linestyle=look["linestyle"], linewidth=1.7)
    axes.set_xscale("log")
    percent_axis(axes)
    return card_of_runs(caption("margins"), axes, runs, series)


def _by_layer(measures: Measures) -> Plot:
    said = replace(caption("depth"), x_label=layer_label(measures.layers))
    routes = measures.routes
    if routes is None or not routes.rows:
        return Plot(caption=said)
    shares_L, first_L = routes.differing_share_L, routes.first_differing_L / routes.rows
    axes = new_axes()
    layers = np.arange(len(shares_L))
    axes.bar(layers, shares_L, color=SIDE_COLOURS["native"], alpha=0.75, width=0.7)
    axes.plot(layers, first_L, color=INK, marker="o", markersize=3.5)
    axes.set_ylim(0, max(1.1 * float(shares_L.max()), 1e-3))
    number_layers(axes.xaxis, measures.layers)
    percent_ticks(axes.yaxis)
    by_layer = zip(measures.layers, shares_L, strict=True)
    alt = f"Tokens that differ: {', '.join(f'{layer} {share:.1%}' for layer, share in by_layer)}"
    return card(said, axes, alt, [Key("differs", SIDE_COLOURS["native"]), Key("differs first", INK)])


def _by_position(measures: Measures) -> Plot:
    said = caption("position")
    explained = measures.explanation
    if explained is None or not np.isfinite(explained.overlap_by_position_T).any():
        return Plot(caption=said)
    overlap_T = explained.overlap_by_position_T
    axes = new_axes()
    axes.plot(np.arange(len(overlap_T)), overlap_T, color=SIDE_COLOURS["native"])
    lowest = float(np.nanmin(overlap_T))
    room = 0.06 * max(1 - lowest, 0.05)
    axes.set_ylim(max(0.0, lowest - room), 1 + room)
    axes.set_yticks([tick for tick in axes.get_yticks() if max(0.0, lowest - room) <= tick <= 1])
    axes.xaxis.set_major_locator(integer_ticks(8))
    percent_ticks(axes.yaxis)
    return card(said, axes, f"Common experts from {np.nanmin(overlap_T):.1%} to {np.nanmax(overlap_T):.1%}")


def _share_by_bin(found: Sequence[MarginsRecord]) -> NDArray[np.float64]:
    counts_B = np.sum([np.sum(margins["counts_LB"], axis=0) for margins in found], axis=0)
    return np.asarray(counts_B / max(counts_B.sum(), 1), np.float64)
