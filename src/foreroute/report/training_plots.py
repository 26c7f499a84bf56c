"""The plots of training over the steps of a run: reward, entropy, gradient norm, and what the update did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foreroute.records import Run
from foreroute.report.figure import (
    Caption,
    Plot,
    percent_axis,
    percent_ticks,
    plot_lines,
    series_by_run,
)
from foreroute.report.run_rows import WINDOW


@dataclass(frozen=True, kw_only=True)
class LinePlot(Caption):
    """A figure of every step, as a line for each run.

    Attributes:
        path: of the figure in a step's record.
        finish: sets limits and formats.
        zeros: whether lines of zeros are worth a plot.
        part: of the loss that it is about, a table of [rl]; runs without that part are not drawn, since their zeros
            would say nothing.
    """

    path: str
    finish: Callable[[Any], None] = lambda axes: None
    zeros: bool = True
    part: str | None = None


def reward_plots(runs: Sequence[Run]) -> list[Plot]:
    """Reward, entropy and gradient norm; reward on held-out problems where some were evaluated."""
    reward = plot_lines(_REWARD, runs, series_by_run(runs, "reward_mean"), smooth=True)
    lines = [plot_lines(each, runs, series_by_run(runs, each.path)) for each in (_ENTROPY, _GRADIENT_NORM)]
    return [reward, *held_out_reward(runs), *lines]


def held_out_reward(runs: Sequence[Run]) -> list[Plot]:
    """One plot, or none where nothing was evaluated."""
    series = series_by_run(runs, "evaluation.reward_mean")
    return [plot_lines(_HELD_OUT, runs, series, style={"marker": "o", "markersize": 4})] if series else []


def update_plots(runs: Sequence[Run]) -> list[Plot]:
    """Those that some run has something to show in; a bound that nothing ever reached is no plot."""
    return [plot for each in _UPDATE for plot in _update_plot(runs, each)]


def _update_plot(runs: Sequence[Run], of: LinePlot) -> list[Plot]:
    parts = [run.config["rl"].get(of.part, {}) if of.part else {} for run in runs]
    without = {place for place, part in enumerate(parts) if part.get("kind") == "none"}
    series = [line for line in series_by_run(runs, of.path) if line.run not in without]
    if not any(of.zeros or line.y.any() for line in series):
        return []
    return [plot_lines(of, runs, series, of.finish, apart={f"Without {of.part}": without})]


def _up_to_all(axes: Any) -> None:
    """Down to the lowest share: the whole axis would make every line one at its top."""
    low = min(axes.get_ylim()[0], 0.99)
    axes.set_ylim(low, 1 + 0.04 * (1 - low))
    percent_ticks(axes.yaxis)


def _from_zero(axes: Any) -> None:
    axes.set_ylim(bottom=0)


_REWARD = Caption(
    title="Reward",
    sentence=f"Mean reward of the responses of each step (thin) and its mean over the last {WINDOW} steps (thick).",
    y_label="mean reward",
)
_HELD_OUT = Caption(
    title="Reward on held-out problems",
    sentence="Mean reward on problems that are not trained on, with the weights that the step began with.",
    y_label="mean reward",
)
_ENTROPY = LinePlot(
    path="entropy",
    title="Entropy",
    sentence="Mean entropy of the trainer's next-token distribution; near zero, exploration has ended.",
    y_label="nats per response token",
)
_GRADIENT_NORM = LinePlot(
    path="grad_norm",
    title="Gradient norm",
    sentence="Norm of the gradient, averaged over the mini-batches of a step; spikes are unstable updates.",
    y_label="norm, before clipping",
)
_UPDATE = (
    LinePlot(
        path="importance.effective_share",
        title="Effective sample size",
        sentence="Tokens of equal weight that would be worth as much as the trained ones, as a share of them; 100 % "
        "where trainer and rollout engine give every token the same probability.",
        y_label="share of trained tokens",
        finish=_up_to_all,
    ),
    LinePlot(
        path="live_agreement",
        title="Live routes",
        sentence="Share of routing decisions in which the policy's own experts, in the last mini-batch of an update, "
        "are still the replayed ones.",
        y_label="share of routing decisions",
        finish=_up_to_all,
    ),
    LinePlot(
        path="clip_share",
        title="Clipped tokens",
        sentence="Share of trained tokens whose update the clip bounds changed.",
        y_label="share of trained tokens",
        finish=percent_axis,
        zeros=False,
    ),
    LinePlot(
        path="importance.cut_share",
        title="Corrected tokens",
        sentence="Share of trained tokens whose importance weight was truncated or masked.",
        y_label="share of trained tokens",
        finish=percent_axis,
        zeros=False,
        part="correction",
    ),
    LinePlot(
        path="importance.rejected_sequences",
        title="Rejected responses",
        sentence="Responses that were not learned from, because trainer and rollout engine disagree about them too "
        "much.",
        y_label="responses",
        finish=_from_zero,
        zeros=False,
        part="rejection",
    ),
    LinePlot(
        path="kl",
        title="Distance to the reference",
        sentence="Estimate of KL(policy || reference) on the trained tokens.",
        y_label="nats per response token",
        zeros=False,
    ),
)
