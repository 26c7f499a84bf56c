"""The plots of expert load over ranks: of every run, and of expert-parallel runs as planned and as executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from foreroute.records import ExecutionRecord, Load, Run
from foreroute.report.figure import (
    INCHES,
    INK,
    Caption,
    Plot,
    card,
    card_of_runs,
    heat_panels,
    integer_ticks,
    series_by_run,
    spans,
    style_of,
)
from foreroute.report.run_rows import planned_steps

WORDS: dict[Load, str] = {"at_home": "every expert at its home", "executed": "executed under the plan"}
LINE = "#1b232c"
MOST_LABELS = 12
"""Micro-steps that are numbered below the heat map; of more, every second one, and so on."""


def expert_load(runs: Sequence[Run]) -> Plot:
    """One panel for each number of ranks."""
    ranks = sorted({int(rank) for run in runs for step in run.steps for rank in step.expert_load})
    rows = {rank: series_by_run(runs, f"expert_load.{rank}") for rank in ranks}
    caption = Caption(
        title="Expert load",
        sentence="Tokens of the busiest rank over the mean of all ranks if experts lay contiguously on that many ranks "
        "(1 is perfect balance), averaged over micro-steps and layers.",
        y_label="busiest rank over mean",
    )

    if not ranks:
        return Plot(caption=caption)
    figure = Figure(figsize=INCHES)
    panels = figure.subplots(len(ranks), sharex=True, squeeze=False)[:, 0]
    for axes, rank in zip(panels, ranks, strict=True):
        for line in rows[rank]:
            axes.plot(line.x, line.y, **style_of(runs, line))
        axes.set_title(f"{rank} ranks", loc="left", fontsize=10.5, color=INK, pad=3)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    panels[-1].xaxis.set_major_locator(integer_ticks(6))
    panels[-1].set_xlabel(caption.x_label)
    figure.supylabel(caption.y_label, fontsize=11, color=INK)
    return card_of_runs(caption, figure, runs, [line for lines in rows.values() for line in lines])


def rank_load_plots(runs: Sequence[Run]) -> list[Plot]:
    """The plots, when any run was expert-parallel under a plan; else none."""
    planned = [position for position, run in enumerate(runs) if planned_steps(run)]
    return [_by_cell(runs, position) for position in planned]


def _by_cell(runs: Sequence[Run], position: int) -> Plot:
    """Every rank in every cell of the last step."""
    run = runs[position]
    step, execution = planned_steps(run)[-1]
    num_ranks = execution.ranks
    of_run = f" of {run.label}" if len(runs) > 1 else ""
    stages = {name: np.array(stage.executed_MLG).shape for name, stage in execution.stages.items()}
    num_layers = next(iter(stages.values()))[1]
    caption = Caption(
        title=f"Load of every rank in every micro-step, step {step}{of_run}",
        sentence=f"Assignments of each rank over the mean of the cell. A column is a cell: in each micro-step the "
        f"{num_layers} routed layers from first to last. All ranks wait there for the busiest one.",
        x_label="micro-step",
        y_label="rank",
    )
    loads = {kind: _over_mean_GC(execution, kind) for kind in WORDS}
    titles = {kind: f"{WORDS[kind]}: busiest {execution.max_over_mean[kind]:.2f} times the mean" for kind in WORDS}
    figure = Figure(figsize=(INCHES[0], 4.6))
    panels = figure.subplots(len(loads), sharex=True)
    heat_panels(figure, panels, {titles[kind]: over_GC for kind, over_GC in loads.items()}, "load over mean")
    for axes in panels:
        axes.set_yticks(range(num_ranks) if num_ranks <= 16 else [0, num_ranks - 1])
        _part_cells(axes, stages)
    _number_micro_steps(panels[-1], stages)
    panels[-1].set_xlabel(caption.x_label, labelpad=22)
    figure.supylabel(caption.y_label, fontsize=11, color=INK)
    said = spans({WORDS[kind]: over_GC for kind, over_GC in loads.items()}, "{:.2f}".format)
    return card(caption, figure, said)


def _part_cells(axes: Any, stages: Mapping[str, tuple[int, ...]]) -> None:
    """Thin lines between micro-steps, thick ones between stages, whose M, L and G are given."""
    start = 0
    for num_micro_steps, num_layers, _ in stages.values():
        for m in range(num_micro_steps):
            if start:
                axes.axvline(start - 0.5, color=LINE, linewidth=0.5 if m else 2.0)
            start += num_layers


def _number_micro_steps(axes: Any, stages: Mapping[str, tuple[int, ...]]) -> None:
    """Below the cells: the numbers of the micro-steps, and the names of the stages where they begin."""
    numbers: list[int] = []
    centres: list[float] = []
    start = 0
    every = -(-sum(num_micro_steps for num_micro_steps, _, _ in stages.values()) // MOST_LABELS)
    for name, (num_micro_steps, num_layers, _) in stages.items():
        numbers += range(0, num_micro_steps, every)
        centres += [start + (m + 0.5) * num_layers - 0.5 for m in range(0, num_micro_steps, every)]
        place = {"xy": (start - 0.5, 0), "xycoords": ("data", "axes fraction")}
        axes.annotate(name, **place, xytext=(1, -19), textcoords="offset points", va="top", fontsize=10.5, color=INK)
        start += num_micro_steps * num_layers
    axes.set_xticks(centres, [str(number) for number in numbers])
    axes.tick_params(axis="x", length=0)


def _over_mean_GC(execution: ExecutionRecord, kind: Load) -> NDArray[np.float64]:
    """float64 [G, C], load over the mean of the cell; 1 in a cell without tokens."""
    stages = execution.stages.values()
    loads_MLG = [stage.at_home_MLG if kind == "at_home" else stage.executed_MLG for stage in stages]
    loads_CG = np.concatenate([np.reshape(each, (-1, execution.ranks)) for each in loads_MLG])
    mean_C = loads_CG.mean(axis=1, keepdims=True)
    return np.asarray(np.where(mean_C > 0, loads_CG / np.maximum(mean_C, 1e-12), 1.0).T, np.float64)
