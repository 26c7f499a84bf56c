"""The plots of the page, as SVG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from experiments.arms import Arms, Measure, Metric, over_steps, reward_last, static
from experiments.grid import MINI_STEPS, REGIMES, ROUTINGS
from experiments.intervals import Interval
from foreroute.report.figure import SIDE_COLOURS
from foreroute.report.format import STYLE

COLOURS = (SIDE_COLOURS["native"], SIDE_COLOURS["replayed"], "#009E73", "#CC79A7", "#333333")
LOOKS = {"none": (COLOURS[0], "o"), "R2": (COLOURS[2], "^"), "R3": (COLOURS[1], "s"), "exact": (COLOURS[4], "D")}
LABELS = {"none": "no replay", "R2": "R2", "R3": "R3", "exact": "no replay, float32 engine"}
WIDTH = 8.0


def draw_all(arms: Arms, folder: Path) -> dict[str, str]:
    """Draw every plot that there are figures for.

    Returns:
        By name, what the plot shows, for readers who do not see it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name, (draw, words) in PICTURES.items():
        path = folder / f"{name}.svg"
        # a picture whose figures are gone would be shown for ever
        path.unlink(missing_ok=True)
        with matplotlib.rc_context(STYLE):
            figure = Figure()
            if draw(arms, figure):
                figure.savefig(path, metadata={"Date": None})
                drawn[name] = words
    return drawn


def _static(arms: Arms, figure: Figure) -> bool:
    rows = []
    for precision in ("bfloat16", "fp8"):
        rows.append((f"{precision}: dense", f"A/dense/{precision}", "none", COLOURS[4]))
        for how, colour in zip(_REPLAYS, COLOURS, strict=False):
            rows.append((f"{precision}: MoE, {_REPLAYS[how]}", f"A/moe/{precision}", how, colour))
    figure.set_size_inches(WIDTH, 4.1)
    shown = False
    panels = figure.subplots(1, 2, sharey=True)
    for axes, measure, label in zip(panels, ("k3", "f1.5"), ("k3, nats per token", "F(1.5)"), strict=True):
        for place, (_, arm, how, colour) in enumerate(rows):
            values = list(arms.values(Measure(arm, static(how, measure))).values())
            shown = shown or bool(values)
            _points(axes, values, place, colour)
        axes.set_xscale("log") if measure == "k3" else axes.set_xscale("symlog", linthresh=1e-4)
        axes.set_xlabel(label)
    panels[0].set_yticks(range(len(rows)), [words for words, *_ in rows])
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    return shown


def _points(axes: Any, values: Sequence[float], place: float, colour: str) -> None:
    """A mark for each seed, and a bar at their mean (geometric means would hide zeros)."""
    if not values:
        return
    axes.plot(values, [place] * len(values), "o", color=colour, markersize=4, alpha=0.55)
    axes.plot([np.mean(values)], [place], "|", color=colour, markersize=15, markeredgewidth=2.4)


def _by_mini_steps(arms: Arms, figure: Figure) -> bool:
    panels = [(reward_last, "B/{}/plain/{}", "without correction"), (reward_last, "B/{}/tis/{}", "with TIS")]
    return _against_mini_steps(arms, figure, panels, "reward of the last 10 steps", log=False)


def _mismatch(arms: Arms, figure: Figure) -> bool:
    measures = {"k3": "k3, nats per token", "f2": "F(2), share of tokens"}
    panels = [(over_steps(name), "B/{}/plain/{}", title) for name, title in measures.items()]
    return _against_mini_steps(arms, figure, panels, "mean over the run", log=True)


def _against_mini_steps(
    arms: Arms, figure: Figure, panels: list[tuple[Metric, str, str]], label: str, *, log: bool
) -> bool:
    figure.set_size_inches(WIDTH, 3.4)
    shown = False
    grid = figure.subplots(1, len(panels), sharey=not log)
    for axes, (measure, pattern, title) in zip(grid, panels, strict=True):
        for number, routing in enumerate(ROUTINGS):
            found = [(n, arms.mean(Measure(pattern.format(routing, n), measure))) for n in MINI_STEPS]
            found = [(n, interval) for n, interval in found if interval.seeds]
            if not found or not any(interval.mean for _, interval in found):
                continue
            shown = True
            _with_bars(axes, [n * 1.05 ** (number - 1) for n, _ in found], [i for _, i in found], routing, log)
        axes.set_xscale("log")
        axes.set_xticks(MINI_STEPS, [str(n) for n in MINI_STEPS])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="x", which="minor", length=0)
        axes.set_xlabel("mini-batches for each rollout")
        axes.set_title(title, fontsize=11)
        if log:
            axes.set_yscale("log")
    grid[0].set_ylabel(label)
    if shown:
        _legend(figure, grid[0])
    return shown


def _with_bars(axes: Any, xs: Sequence[float], intervals: Sequence[Interval], look: str, log: bool) -> None:
    colour, marker = LOOKS[look]
    means = np.array([interval.mean for interval in intervals])
    below = np.nan_to_num(means - [interval.low for interval in intervals])
    above = np.nan_to_num([interval.high for interval in intervals] - means)
    if log:  # an interval that reaches zero ends at the bottom of the plot
        below = np.minimum(below, 0.95 * means)
    axes.errorbar(xs, means, [below, above], color=colour, marker=marker, markersize=5, capsize=3, label=LABELS[look])


def _boundary(arms: Arms, figure: Figure) -> bool:
    rows = {"part B": ("B/none/plain/8", "B/R3/plain/8", "F/part B/exact")}
    rows |= {name: (f"F/{name}/none", f"F/{name}/R3", f"F/{name}/exact") for name in REGIMES}
    figure.set_size_inches(WIDTH, 4.2)
    axes = figure.subplots()
    shown = False
    for place, names in enumerate(rows.values()):
        for number, (arm, look) in enumerate(zip(names, ("none", "R3", "exact"), strict=True)):
            interval = arms.mean(Measure(arm, reward_last))
            if not interval.seeds:
                continue
            colour, marker = LOOKS[look]
            half = np.nan_to_num(interval.high - interval.mean)
            label = LABELS[look] if not place else None
            y = place + 0.2 * (number - 1)
            axes.errorbar(
                [interval.mean], [y], xerr=[half], color=colour, marker=marker, markersize=5, capsize=3, label=label
            )
            shown = True
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("reward of the last 10 steps")
    if shown:
        _legend(figure, axes)
    return shown


def _legend(figure: Figure, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=10)


_REPLAYS = {"none": "no replay", "R3": "R3", "R3+weights": "R3 + weights", "shifted": "R3, shifted"}
PICTURES: dict[str, tuple[Callable[[Arms, Figure], bool], str]] = {
    "static": (_static, "Mismatch at fixed weights, a point for each seed, a bar at their mean"),
    "reward": (_by_mini_steps, "Reward at the end of a run against mini-batches, without replay, with R2 and R3"),
    "mismatch": (_mismatch, "Mismatch over a run against mini-batches, without replay, with R2 and R3"),
    "boundary": (_boundary, "Reward at the end of a run in each regime, without replay, with R3, and without mismatch"),
}
