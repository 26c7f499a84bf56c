"""The plots of expert load over ranks: of every run, and of expert-parallel runs as planned and as executed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from foreroute.records import ExecutionRecord, Run
from foreroute.report.figure import INCHES, INK, card_of_runs, heat_maps, integer_ticks, series_by_run, style_of
from foreroute.report.page import Plot, caption
from foreroute.report.run_tables import planned_steps


def expert_load(runs: Sequence[Run]) -> Plot:
    """One panel for each number of ranks."""
    said = caption("expert_load")
    ranks = sorted({int(rank) for run in runs for step in run.steps for rank in step.get("expert_load", {})})
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


def rank_load_plots(runs: Sequence[Run]) -> list[Plot]:
    """Every rank in every cell of the last step, of each run that was expert-parallel under a plan."""
    plots = []
    for run in runs:
        if steps := planned_steps(run):
            step, execution = steps[-1]
            said = caption(
                "rank_load",
                step=step,
                of_run=f" of {run.label}" if len(runs) > 1 else "",
                layers=np.shape(next(iter(execution["stages"].values()))["executed_MLG"])[1],
                passes=", then of ".join(execution["stages"]),
            )
            loads = {
                "every expert at its home": _over_mean_GC(execution, "at_home_MLG"),
                "executed under the plan": _over_mean_GC(execution, "executed_MLG"),
            }
            plots.append(heat_maps(said, loads, below=True))
    return plots


def _over_mean_GC(execution: ExecutionRecord, name: Literal["at_home_MLG", "executed_MLG"]) -> NDArray[np.float64]:
    """float64 [G, C], load over the mean of the cell; 1 in a cell without tokens."""
    loads_MLG = [np.array(stage[name], np.int64) for stage in execution["stages"].values()]
    loads_CG = np.concatenate([each.reshape(-1, execution["ranks"]) for each in loads_MLG])
    mean_C = loads_CG.mean(axis=1, keepdims=True)
    return np.asarray(np.where(mean_C > 0, loads_CG / np.maximum(mean_C, 1e-12), 1.0).T, np.float64)
