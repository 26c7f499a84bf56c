"""The plots of expert-parallel runs: the load of every rank with experts at their homes, and as it was executed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from foreroute.report.canvas import TALL_INCHES, Caption, Plot, Series, plot, plot_figure
from foreroute.report.records import Load, Run, StageLoads

WORDS: dict[Load, str] = {"at_home": "every expert at its home", "executed": "executed under the plan"}
STYLES: dict[Load, Any] = {"at_home": (0, (1.2, 1.2)), "executed": "-"}


def rank_load_plots(runs: Sequence[Run]) -> list[Plot]:
    """The plots, when any run was expert-parallel under a plan; else none."""
    if not any(_planned_steps(run) for run in runs):
        return []
    return [over_steps(runs), *(by_cell(runs, position) for position, run in enumerate(runs) if _planned_steps(run))]


def over_steps(runs: Sequence[Run]) -> Plot:
    caption = Caption(
        title="Load of the busiest rank",
        sentence="Assignments of the busiest rank over the mean of all ranks, summed over cells (1 is balance): "
        "with every expert at its home (dotted), and as executed under the plan (solid).",
        x_label="training step",
        y_label="busiest rank over mean",
        absent="No run was expert-parallel under a plan.",
    )
    found: list[tuple[Load, Series]] = []
    for position, run in enumerate(runs):
        steps = _planned_steps(run)
        for kind in WORDS:
            values = [(step, execution.max_over_mean[kind]) for step, execution in steps]
            if values:
                x, y = np.array(values, np.float64).T
                found.append((kind, Series(position, None, x, y)))

    def draw(axes: Any) -> None:
        for kind, line in found:
            axes.plot(line.x, line.y, **line.look | {"linestyle": STYLES[kind]})
        axes.set_ylim(bottom=1 - 0.03 * (axes.get_ylim()[1] - 1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))

    return plot(caption, runs, [line for _, line in found], draw)


def by_cell(runs: Sequence[Run], position: int) -> Plot:
    run = runs[position]
    step, execution = _planned_steps(run)[-1]
    names = list(execution.stages)
    loads: dict[Load, NDArray[np.float64]] = {kind: _over_mean_GC(execution.stages, kind) for kind in WORDS}
    of_run = f" of {run.label}" if len(runs) > 1 else ""
    caption = Caption(
        title=f"Load of every rank, step {step}{of_run}",
        sentence="Assignments of each rank over the mean of its cell. A column is a cell, one routed layer in one "
        f"micro-step, in the order of execution; the stages ({', '.join(names)}) are set apart by lines. "
        "In each cell all ranks wait for the busiest one.",
        x_label="cells in the order of execution",
        y_label="rank",
        absent="No run was expert-parallel under a plan.",
    )
    ends = np.cumsum([stage.num_cells for stage in execution.stages.values()])[:-1]
    reach = max(0.05, *(float(np.abs(over - 1).max()) for over in loads.values()))

    def fill(figure: Figure) -> None:
        panels = figure.subplots(len(loads), sharex=True)
        for axes, (kind, over_GC) in zip(panels, loads.items(), strict=True):
            shown = axes.imshow(over_GC, aspect="auto", cmap="RdBu_r", vmin=1 - reach, vmax=1 + reach, rasterized=False)
            axes.set_title(WORDS[kind], loc="left", fontsize=10.5, color="#3b4550", pad=3)
            axes.set_yticks(range(len(over_GC)) if len(over_GC) <= 16 else [])
            axes.grid(visible=False)
            for end in ends:
                axes.axvline(end - 0.5, color="#3b4550", linewidth=0.9)
        panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        panels[-1].set_xlabel(caption.x_label)
        figure.supylabel(caption.y_label, fontsize=11, color="#3b4550")
        figure.colorbar(shown, ax=panels, label="load over mean")

    cells = np.arange(loads["executed"].shape[1], dtype=np.float64)
    series = [Series(position, None, cells, over.max(axis=0)) for over in loads.values()]
    return plot_figure(caption, [run], [Series(0, None, line.x, line.y) for line in series], fill, TALL_INCHES)


def _planned_steps(run: Run) -> list[tuple[int, Any]]:
    return [(step.step, step.execution) for step in run.steps if step.execution is not None and step.execution.stages]


def _over_mean_GC(stages: dict[str, StageLoads], kind: Load) -> NDArray[np.float64]:
    """float64 [G, C], load over the mean of the cell; 1 in a cell without tokens."""
    loads_CG = np.concatenate([stage.of(kind).reshape(-1, stage.num_ranks) for stage in stages.values()])
    mean_C = loads_CG.mean(axis=1, keepdims=True)
    return np.asarray(np.where(mean_C > 0, loads_CG / np.maximum(mean_C, 1e-12), 1.0).T, np.float64)
