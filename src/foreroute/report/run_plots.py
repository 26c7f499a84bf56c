"""The plots of runs: mismatch, reward and updates over their steps, and the load of experts over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.mismatch import LOG10_EDGES
from foreroute.records import Run, StepRecord
from foreroute.records.step_record import SIDES, Side
from foreroute.report.figure import (
    SIDE_COLOURS,
    card,
    heat_maps,
    integer_ticks,
    layer_label,
    new_axes,
    number_layers,
    percent_axis,
    percent_ticks,
)
from foreroute.report.page import Caption, Key, Plot
from foreroute.report.run_tables import planned_steps

SIDE_WORDS: dict[Side, str] = {"native": "without replay", "replayed": "with replay"}
DASHES = ("", "6 3", "2 2", "8 2 2 2")
"""By run, as in SVG; matplotlib takes the numbers."""
SHADES = (0.0, 0.45, -0.4)
"""By run among those that train on the same side: towards white, or black. With four dashes, twelve looks."""
REACH = 5
"""Values on either side of one that the thick line is the median of."""
THICK = f"Thick: median of the {2 * REACH + 1} measurements around each, which keeps jumps."
SHARES = {
    "differing_share": Caption(
        title="Routing disagreement",
        sentence=(
            "Share of routing decisions in which trainer and rollout engine use different sets of experts. " + THICK
        ),
        y_label="share of routing decisions",
    ),
    "f2": Caption(
        title="Tokens far apart, F(2)",
        sentence=(
            "Share of response tokens whose probabilities in trainer and rollout engine differ more than twofold. "
            + THICK
        ),
        y_label="share of response tokens",
    ),
}
"""Captions of shares of the mismatch, by measure."""
LINES = {
    "reward_mean": Caption(
        title="Reward",
        sentence=f"Mean reward of the responses of each step. {THICK}",
        y_label="mean reward",
    ),
    "entropy": Caption(
        title="Entropy",
        sentence="Mean entropy of the trainer's next-token distribution; near zero, exploration has ended.",
        y_label="nats per response token",
    ),
    "grad_norm": Caption(
        title="Gradient norm",
        sentence="Norm of the gradient, averaged over the mini-batches of a step; spikes are unstable updates.",
        y_label="norm, before clipping",
    ),
}
"""Captions of figures that every run has, by key of a step's record."""
UPDATE = {
    "importance.effective_share": Caption(
        title="Effective sample size",
        sentence=(
            "Tokens of equal weight that would be worth as much as the trained ones, as a share of them; 100 % where "
            "trainer and rollout engine give every token the same probability."
        ),
        y_label="share of trained tokens",
    ),
    "live_agreement": Caption(
        title="Live routes",
        sentence=(
            "Share of routing decisions in which the policy's own experts, in the last mini-batch of an update, are "
            "still the replayed ones."
        ),
        y_label="share of routing decisions",
    ),
    "clip_share": Caption(
        title="Clipped tokens",
        sentence="Share of trained tokens whose update the clip bounds changed.",
        y_label="share of trained tokens",
    ),
    "importance.cut_share": Caption(
        title="Corrected tokens",
        sentence="Share of trained tokens whose importance weight was truncated or masked.",
        y_label="share of trained tokens",
    ),
}
"""Captions of figures of the update, by key of a step's record."""
RARE = ("clip_share", "cut_share")
"""Ends of the keys of those that are near zero in a sound run; the others are near one."""


@dataclass(frozen=True)
class Series:
    """One line of the run at this position of the report. Where x are edges, `y` has one entry less than `x`."""

    run: int
    side: Side | None
    x: NDArray[np.float64]
    y: NDArray[np.float64]


def run_plots(runs: Sequence[Run]) -> list[Plot]:
    """All that every run may have, over its steps or summed over them."""
    shares = [
        plot_lines(said, runs, series_by_side(runs, measure), percent_axis, smooth=True)
        for measure, said in SHARES.items()
    ]
    reward, *lines = (
        plot_lines(said, runs, series_by_run(runs, path), smooth=path == "reward_mean") for path, said in LINES.items()
    )
    mismatch = [_k3(runs), *shares, disagreement_by_layer(runs), _margins(runs)]
    return [*mismatch, reward, *lines, *update_plots(runs)]


def update_plots(runs: Sequence[Run]) -> list[Plot]:
    """Plots of the update that some run has something to show in; a bound that nothing ever reached is no plot."""
    series = {path: series_by_run(runs, path) for path in UPDATE}
    return [
        plot_lines(UPDATE[path], runs, lines, percent_axis if path.endswith(RARE) else _up_to_all)
        for path, lines in series.items()
        if any(line.y.any() for line in lines)
    ]


def rank_load_plots(runs: Sequence[Run]) -> list[Plot]:
    """Every rank in every cell of the last step, of each run that was expert-parallel under a plan."""
    plots = []
    for run in runs:
        if steps := planned_steps(run):
            # one step shows how a plan works; the last is what the run became
            step, execution = steps[-1]
            passes = execution.passes.values()
            of_run = f" of {run.label}" if len(runs) > 1 else ""
            layers = np.shape(next(iter(passes)).executed_MLG)[1]
            said = Caption(
                title=f"Load of every rank in every cell, step {step}{of_run}",
                sentence=(
                    "Assignments of each rank over the mean of the cell. A column is a cell: in each micro-step the "
                    f"{layers} routed layers from first to last, first of {', then of '.join(execution.passes)}. All "
                    "ranks wait there for the busiest one."
                ),
                x_label="cell",
                y_label="rank",
            )
            loads = {
                "every expert at its home": _over_mean_GC([each.at_home_MLG for each in passes], execution.ranks),
                "executed under the plan": _over_mean_GC([each.executed_MLG for each in passes], execution.ranks),
            }
            plots.append(heat_maps(said, loads, below=True))
    return plots


def _k3(runs: Sequence[Run]) -> Plot:
    series = series_by_side(runs, "k3")
    # replay may make k3 exactly 0, which has no logarithm
    positive = [value for line in series for value in line.y if 0 < value < np.inf]
    # The power of ten below the smallest value: the axis is logarithmic down to there, and linear to zero.
    floor = 10.0 ** np.floor(np.log10(min(positive, default=1.0)))

    def finish(axes: Any) -> None:
        axes.set_yscale("symlog", linthresh=floor, linscale=0.4)
        axes.set_ylim(bottom=-0.25 * floor)  # a line of exact zeros would vanish in the axis

    said = Caption(
        title="Mismatch of trainer and rollout engine (k3)",
        sentence=(
            f"k3 estimates KL(rollout engine || trainer) on the sampled response tokens. {THICK} Logarithmic above "
            f"{floor:.0e}, linear below it so that zero can be shown."
        ),
        y_label="k3, nats per response token",
    )
    return plot_lines(said, runs, series, finish, smooth=True)


def disagreement_by_layer(runs: Sequence[Run]) -> Plot:
    """Draw the layers by the numbers that runs recorded, or counted from 0 where these differ."""
    series, tables = [], set()
    for position, side in product(range(len(runs)), SIDES):
        shares = (each.differing_share_by_layer for each in runs[position].measured[side])
        if found := [each for each in shares if each]:
            shares_L = np.mean([list(each.values()) for each in found], axis=0)
            series.append(Series(position, side, np.arange(len(shares_L), dtype=np.float64), shares_L))
            tables.add(tuple(found[0]))
    # numbers of one model would be wrong for another on the same axis
    layers = tables.pop() if len(tables) == 1 else ()

    def finish(axes: Any) -> None:
        number_layers(axes.xaxis, layers)
        percent_axis(axes)

    said = Caption(
        title="Routing disagreement by layer",
        sentence="Share of tokens whose expert set differs in a layer, averaged over the measured steps.",
        x_label=layer_label(layers),
        y_label="share of tokens",
    )
    return plot_lines(said, runs, series, finish)


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
    said = Caption(
        title="Top-k margins",
        sentence=(
            "Gap between the last selected and the first rejected expert's score; the further left, the smaller the "
            "numerical difference that changes the selection."
        ),
        x_label="score gap (logarithmic)",
        y_label="share of routing decisions",
    )
    return card_of_runs(said, axes, runs, series)


def _share_by_bin(found: Sequence[list[list[int]]]) -> NDArray[np.float64]:
    counts_B = np.sum([np.sum(counts_LB, axis=0) for counts_LB in found], axis=0)
    return np.asarray(counts_B / max(counts_B.sum(), 1), np.float64)


def _up_to_all(axes: Any) -> None:
    """Down to the lowest share: the whole axis would make every line one at its top."""
    low = min(axes.get_ylim()[0], 0.99)
    axes.set_ylim(low, 1 + 0.04 * (1 - low))
    percent_ticks(axes.yaxis)


def _over_mean_GC(loads_MLG: Sequence[Any], num_ranks: int) -> NDArray[np.float64]:
    """float64 [G, C], load over the mean of the cell, of integers [M, L, G] by pass; 1 in a cell without tokens."""
    loads_CG = np.concatenate([np.reshape(each, (-1, num_ranks)) for each in loads_MLG])
    mean_C = loads_CG.mean(axis=1, keepdims=True)
    return np.asarray(np.where(mean_C > 0, loads_CG / np.maximum(mean_C, 1e-12), 1.0).T, np.float64)


def card_of_runs(caption: Caption, drawn: Any, runs: Sequence[Run], series: Sequence[Series]) -> Plot:
    """Make a card with the legend of its runs; without a picture where no series has a number."""
    # infinite values would stretch the span that is told to those who see no picture
    values = [line.y[np.isfinite(line.y)] for line in series]
    if not any(finite.size for finite in values):
        return Plot(caption=caption)
    finite = np.concatenate(values)
    names = ", ".join(runs[position].label for position in sorted({line.run for line in series}))
    alt = f"{caption.y_label} against {caption.x_label}, from {finite.min():.3g} to {finite.max():.3g}, for {names}"
    return card(caption, drawn, alt, _keys(runs, series), _notes(runs, series))


def plot_lines(
    caption: Caption,
    runs: Sequence[Run],
    series: Sequence[Series],
    finish: Callable[[Any], None] = lambda axes: None,
    *,
    smooth: bool = False,
) -> Plot:
    """Draw one line per series; `finish` sets limits and formats afterwards.

    With `smooth` a thick line is the median of the values around each, and a thin one the values.
    """
    axes = new_axes()
    for line in series:
        look = style_of(runs, line)
        if smooth:
            axes.plot(line.x, line.y, color=look["color"], linewidth=0.7, alpha=0.45)
            # not a mean, which would make a slope of a sudden jump
            medians = [np.median(line.y[max(0, at - REACH) : at + REACH + 1]) for at in range(len(line.y))]
            axes.plot(line.x, medians, **look | {"linewidth": 2.2})
        else:
            axes.plot(line.x, line.y, **look)
    axes.xaxis.set_major_locator(integer_ticks(6))
    finish(axes)
    return card_of_runs(caption, axes, runs, series)


def series_by_run(runs: Sequence[Run], path: str) -> list[Series]:
    """One line of each run over its steps; a run that never recorded the figure has none."""
    return [line for position, run in enumerate(runs) for line in _series(position, run, None, path)]


def series_by_side(runs: Sequence[Run], measure: str) -> list[Series]:
    """One line of each run and side, over the steps at which that side was measured."""
    return [
        line
        for position, run in enumerate(runs)
        for side in SIDES
        for line in _series(position, run, side, f"mismatch.{side}.{measure}")
    ]


def _series(position: int, run: Run, side: Side | None, path: str) -> list[Series]:
    points = [(step.step, y) for step in run.steps if (y := _recorded(step, path)) is not None]
    return [Series(position, side, *np.array(points, np.float64).T)] if points else []


def _recorded(step: StepRecord, path: str) -> float | None:
    """The figure that a step recorded by this path of keys, joined by dots; of a list the last. None where none."""
    found: Any = step
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else getattr(found, key, None)
    return (found[-1] if found else None) if isinstance(found, list) else found


def colour_of(runs: Sequence[Run], position: int, side: Side | None = None) -> str:
    """The colour of a side, by default of that which the run trains with; runs of the same one differ in shade."""
    from matplotlib.colors import to_hex, to_rgb

    # runs of one side share its hue, so that side stays the first thing that is seen
    own = runs[position].trains_with
    rank = sum(run.trains_with == own for run in runs[:position])
    shade = SHADES[rank % len(SHADES)]
    towards = np.array([1.0, 1.0, 1.0] if shade > 0 else [0.0, 0.0, 0.0])
    return to_hex((1 - abs(shade)) * np.array(to_rgb(SIDE_COLOURS[side or own])) + abs(shade) * towards)


def dashes_of(position: int) -> str:
    """The dashes of a run, as in SVG; none of the first."""
    return DASHES[position % len(DASHES)]


def style_of(runs: Sequence[Run], line: Series) -> dict[str, Any]:
    """Colour by side, dashes by run. Points are marked where they are few."""
    dashes = dashes_of(line.run)
    return {
        "color": colour_of(runs, line.run, line.side),
        "linestyle": (0, [float(length) / 2 for length in dashes.split()]) if dashes else "-",
        "marker": "o" if len(line.x) < 30 else None,
        "markersize": 3.2,
        "markevery": max(1, len(line.x) // 30),
    }


def _keys(runs: Sequence[Run], series: Sequence[Series]) -> tuple[Key, ...]:
    """Sides by colour, and runs by dashes; by both where no line is of a side."""
    drawn = sorted({line.run for line in series})
    sides = [side for side in SIDES if any(line.side == side for line in series)]
    several = drawn if len(runs) > 1 else []
    of_runs = [Key(runs[index].label, None, dashes_of(index)) if sides else run_key(runs, index) for index in several]
    return (*(Key(SIDE_WORDS[side], SIDE_COLOURS[side]) for side in sides), *of_runs)


def run_key(runs: Sequence[Run], position: int) -> Key:
    """Look of the line of a run that is of no side: its colour is that of the side which it trains with."""
    label = f"{runs[position].label}, trained {SIDE_WORDS[runs[position].trains_with]}"
    return Key(label, colour_of(runs, position), dashes_of(position))


def _notes(runs: Sequence[Run], series: Sequence[Series]) -> tuple[str, ...]:
    drawn = {line.run for line in series}
    silent = [run.label for index, run in enumerate(runs) if index not in drawn]
    notes = [f"Not recorded by: {', '.join(f'“{name}”' for name in silent)}."] if silent else []
    # matplotlib leaves these out silently
    lost = sum(int((~np.isfinite(line.y)).sum()) for line in series)
    if lost:
        notes.append(f"Not drawn: {lost} value{'s' if lost > 1 else ''} that are infinite or not a number.")
    return tuple(notes)
