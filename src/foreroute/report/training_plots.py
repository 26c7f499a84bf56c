"""The plots of training over the steps of a run: reward, entropy, gradient norm, and what the update did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from foreroute.records import Run
from foreroute.report.figure import percent_axis, percent_ticks, plot_lines, series_by_run
from foreroute.report.page import Plot, caption
from foreroute.report.run_tables import WINDOW


class UpdatePlot(NamedTuple):
    """A number of every update, as a line for each run.

    Attributes:
        path: of the number in a step's record; its last key names the caption.
        finish: sets limits and formats.
        zeros: whether lines of zeros are worth a plot.
    """

    path: str
    finish: Callable[[Any], None]
    zeros: bool = True


def reward_plots(runs: Sequence[Run]) -> list[Plot]:
    """Reward, entropy and gradient norm."""
    reward = plot_lines(caption("reward", window=WINDOW), runs, series_by_run(runs, "reward_mean"), smooth=True)
    lines = [plot_lines(caption(name), runs, series_by_run(runs, name)) for name in ("entropy", "grad_norm")]
    return [reward, *lines]


def update_plots(runs: Sequence[Run]) -> list[Plot]:
    """Those that some run has something to show in; a bound that nothing ever reached is no plot."""
    plots = []
    for of in UPDATE:
        series = series_by_run(runs, of.path)
        if any(of.zeros or line.y.any() for line in series):
            plots.append(plot_lines(caption(of.path.rpartition(".")[2]), runs, series, of.finish))
    return plots


def _up_to_all(axes: Any) -> None:
    """Down to the lowest share: the whole axis would make every line one at its top."""
    low = min(axes.get_ylim()[0], 0.99)
    axes.set_ylim(low, 1 + 0.04 * (1 - low))
    percent_ticks(axes.yaxis)


UPDATE = (
    UpdatePlot("importance.effective_share", _up_to_all),
    UpdatePlot("live_agreement", _up_to_all),
    UpdatePlot("clip_share", percent_axis, zeros=False),
    UpdatePlot("importance.cut_share", percent_axis, zeros=False),
)
