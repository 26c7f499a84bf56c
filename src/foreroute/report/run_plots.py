"""The plots of runs: mismatch, reward and updates over their steps, and the load of experts over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from foreroute.mismatch import LOG10_EDGES
from foreroute.records import Run
from foreroute.records.step_record import SIDES
from foreroute.report.figure import (
    INCHES,
    Series,
    card_of_runs,
    heat_maps,
    integer_ticks,
    layer_label,
    new_axes,
    number_layers,
    percent_axis,
    percent_ticks,
    plot_lines,
    series_by_run,
    series_by_side,
    style_of,
)
from foreroute.report.format import INK, WINDOW
from foreroute.report.page import Plot, caption
from foreroute.report.run_tables import planned_steps

if TYPE_CHECKING:
    from foreroute.trace import RoutedLayer


def run_plots(runs: Sequence[Run]) -> list[Plot]:
    """All that every run may have, over its steps or summed over them."""
    shares = [
        plot_lines(caption(name, window=WINDOW), runs, series_by_side(runs, measure), percent_axis, smooth=True)
        for name, measure in (("differing", "differing_share"), ("f2", "f2"))
    ]
    reward = plot_lines(caption("reward", window=WINDOW), runs, series_by_run(runs, "reward_mean"), smooth=True)
    lines = [plot_lines(caption(name), runs, series_by_run(runs, name)) for name in ("entropy", "grad_norm")]
    mismatch = [_k3(runs), *shares, _disagreement_by_layer(runs), _margins(runs)]
    return [*mismatch, reward, *lines, *update_plots(runs), _expert_load(runs)]


def update_plots(runs: Sequence[Run]) -> list[Plot]:
    """Plots of the update that some run has something to show in; a bound that nothing ever reached is no plot."""
    finish = {"importance.effective_share": _up_to_all, "live_agreement": _up_to_all}
    finish |= {"clip_share": percent_axis, "importance.cut_share": percent_axis}
    series = {path: series_by_run(runs, path) for path in finish}
    return [
        plot_lines(caption(path.rpartition(".")[2]), runs, lines, finish[path])
        for path, lines in series.items()
        if any(line.y.any() for line in lines)
    ]


def rank_load_plots(runs: Sequence[Run]) -> list[Plot]:
    """Every rank in every cell of the last step, of each run that was expert-parallel under a plan."""
    plots = []
    for run in runs:
        if steps := planned_steps(run):
            step, execution = steps[-1]
            stages = execution.stages.values()
            said = caption(
                "rank_load",
                step=step,
                of_run=f" of {run.label}" if len(runs) > 1 else "",
                layers=np.shape(next(iter(execution.stages.values())).executed_MLG)[1],
                passes=", then of ".join(execution.stages),
            )
            loads = {
                "every expert at its home": _over_mean_GC([each.at_home_MLG for each in stages], execution.ranks),
                "executed under the plan": _over_mean_GC([each.executed_MLG for each in stages], execution.ranks),
            }
            plots.append(heat_maps(said, loads, below=True))
    return plots


def layers_of(runs: Sequence[Run], shown: Sequence[tuple[int, int]]) -> tuple[RoutedLayer, ...]:
    """The layers of these runs, each given with how many it recorded; none where they are unknown, or not the same."""
    tables = {runs[position].layers for position, _ in shown}
    # numbers of one model would be wrong for another on the same axis
    same = tables.pop() if len(tables) == 1 else ()
    return same if all(recorded == len(same) for _, recorded in shown) else ()


def _k3(runs: Sequence[Run]) -> Plot:
    series = series_by_side(runs, "k3")
    # replay may make k3 exactly 0, which has no logarithm
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
        measured = (step.mismatch[side] for step in runs[position].steps_to_compare(side))
        if found := [each.differing_share_by_layer for each in measured if each.differing_share_by_layer]:
            shares_L = np.asarray(np.mean(found, axis=0), np.float64)
            series.append(Series(position, side, np.arange(len(shares_L), dtype=np.float64), shares_L))
    layers = layers_of(runs, [(line.run, len(line.x)) for line in series])

    def finish(axes: Any) -> None:
        number_layers(axes.xaxis, layers)
        percent_axis(axes)

    return plot_lines(replace(caption("differing_by_layer"), x_label=layer_label(layers)), runs, series, finish)


def _margins(runs: Sequence[Run]) -> Plot:
    series = []
    for position, run in enumerate(runs):
        found = [step.margins_LB for step in run.steps if step.margins_LB]
        if found:
            series.append(Series(position, None, 10**LOG10_EDGES, _share_by_bin(found)))
    axes = new_axes()
    for line in series:
        look = style_of(runs, line)
        axes.stairs(line.y, line.x, baseline=None, color=look["color"], linestyle=look["linestyle"], linewidth=1.7)
    axes.set_xscale("log")
    percent_axis(axes)
    return card_of_runs(caption("margins"), axes, runs, series)


def _share_by_bin(found: Sequence[list[list[int]]]) -> NDArray[np.float64]:
    counts_B = np.sum([np.sum(counts_LB, axis=0) for counts_LB in found], axis=0)
    return np.asarray(counts_B / max(counts_B.sum(), 1), np.float64)


def _up_to_all(axes: Any) -> None:
    """Down to the lowest share: the whole axis would make every line one at its top."""
    low = min(axes.get_ylim()[0], 0.99)
    axes.set_ylim(low, 1 + 0.04 * (1 - low))
    percent_ticks(axes.yaxis)


def _expert_load(runs: Sequence[Run]) -> Plot:
    """One panel for each number of ranks."""
    said = caption("expert_load")
    # runs may have been measured for other numbers of ranks
    ranks = sorted({int(rank) for run in runs for step in run.steps for rank in step.expert_load})
    if not ranks:
        return Plot(caption=said)
    rows = {rank: series_by_run(runs, f"expert_load.{rank}") for rank in ranks}
    figure = Figure(figsize=INCHES)
    panels = figure.subplots(len(ranks), sharex=True, squeeze=False)[:, 0]
    for axes, rank in zip(panels, ranks, strict=True):
        for line in rows[rank]:
            axes.plot(line.x, line.y, **style_of(runs, line))
        axes.set_title(f"{rank} ranks", loc="left", fontsize=10.5, color=INK, pad=3)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    panels[-1].xaxis.set_major_locator(integer_ticks(6))
    panels[-1].set_xlabel(said.x_label)
    figure.supylabel(said.y_label, fontsize=11, color=INK)
    return card_of_runs(said, figure, runs, [line for lines in rows.values() for line in lines])


def _over_mean_GC(loads_MLG: Sequence[Any], num_ranks: int) -> NDArray[np.float64]:
    """float64 [G, C], load over the mean of the cell, of integers [M, L, G] by pass; 1 in a cell without tokens."""
    loads_CG = np.concatenate([np.reshape(each, (-1, num_ranks)) for each in loads_MLG])
    mean_C = loads_CG.mean(axis=1, keepdims=True)
    return np.asarray(np.where(mean_C > 0, loads_CG / np.maximum(mean_C, 1e-12), 1.0).T, np.float64)
