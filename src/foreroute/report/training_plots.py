"""The plots of training over the steps of a run: reward, entropy, gradient norm, and what the update did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from foreroute.report.figure import (
    STEP,
    Caption,
    Plot,
    integer_ticks,
    percent_axis,
    plot_lines,
    plot_series,
    series_by_run,
)
from foreroute.report.records import Run, StepRecord
from foreroute.report.run_rows import WINDOW

NEVER = "This was not recorded."


def reward_plots(runs: Sequence[Run]) -> list[Plot]:
    """Reward, entropy and gradient norm; reward on held-out problems where some were evaluated."""
    return [_reward(runs), *held_out_reward(runs), _entropy(runs), _gradient_norm(runs)]


def update_plots(runs: Sequence[Run]) -> list[Plot]:
    """Those that some run has something to show in; a bound that nothing ever reached is no plot."""
    plots = []
    effective = series_by_run(runs, _effective)
    if effective:
        plots.append(plot_lines(_EFFECTIVE, runs, effective, _up_to_all))
    live = series_by_run(runs, _live_agreement)
    if live:
        plots.append(plot_lines(_LIVE, runs, live, percent_axis))
    clipped = series_by_run(runs, _clipped)
    if any(line.y.any() for line in clipped):
        plots.append(plot_lines(_CLIPPED, runs, clipped, percent_axis))
    plots += _of_those_that("correction", runs, _CUT, _cut, percent_axis)
    plots += _of_those_that("rejection", runs, _REJECTED, _rejected, _from_zero)
    divergence = series_by_run(runs, _divergence)
    if any(line.y.any() for line in divergence):
        plots.append(plot_lines(_DIVERGENCE, runs, divergence))
    return plots


def _reward(runs: Sequence[Run]) -> Plot:
    caption = Caption(
        title="Reward",
        sentence=f"Mean reward of the responses of each step (thin) and its mean over the last {WINDOW} steps (thick).",
        x_label=STEP,
        y_label="mean reward",
        absent="No reward was recorded (reward_mean).",
    )
    series = series_by_run(runs, lambda step: step.reward_mean)

    def draw(axes: Any) -> None:
        for line in series:
            axes.plot(line.x, line.y, **line.style | {"marker": None, "linewidth": 0.8, "alpha": 0.4})
            axes.plot(line.x, _trailing_mean(line.y), **line.style | {"linewidth": 2.2})
        axes.xaxis.set_major_locator(integer_ticks(6))

    return plot_series(caption, runs, series, draw)


def held_out_reward(runs: Sequence[Run]) -> list[Plot]:
    """One plot, or none where nothing was evaluated."""
    series = series_by_run(runs, lambda step: step.evaluation.reward_mean if step.evaluation else None)
    if not series:
        return []
    caption = Caption(
        title="Reward on held-out problems",
        sentence="Mean reward on problems that are not trained on, with the weights that the step began with.",
        x_label=STEP,
        y_label="mean reward",
        absent="Nothing was evaluated.",
    )

    def draw(axes: Any) -> None:
        for line in series:
            axes.plot(line.x, line.y, **line.style | {"marker": "o", "markersize": 4})
        axes.xaxis.set_major_locator(integer_ticks(6))

    return [plot_series(caption, runs, series, draw)]


def _entropy(runs: Sequence[Run]) -> Plot:
    caption = Caption(
        title="Entropy",
        sentence="Mean entropy of the trainer's next-token distribution; near zero, exploration has ended.",
        x_label=STEP,
        y_label="nats per response token",
        absent="No entropy was recorded.",
    )
    return plot_lines(caption, runs, series_by_run(runs, lambda step: step.entropy))


def _gradient_norm(runs: Sequence[Run]) -> Plot:
    caption = Caption(
        title="Gradient norm",
        sentence="Norm of the gradient, averaged over the mini-batches of a step; spikes are unstable updates.",
        x_label=STEP,
        y_label="norm, before clipping",
        absent="No gradient norm was recorded (grad_norm).",
    )
    return plot_lines(caption, runs, series_by_run(runs, lambda step: step.grad_norm))


def _of_those_that(
    part: str,
    runs: Sequence[Run],
    caption: Caption,
    value: Callable[[StepRecord], float | None],
    finish: Callable[[Any], None],
) -> list[Plot]:
    """A plot of the runs that have this part in their loss; lines of zeros of the others would say nothing."""
    without = {place for place, run in enumerate(runs) if run.config["rl"].get(part, {}).get("kind") == "none"}
    series = [line for line in series_by_run(runs, value) if line.run not in without]
    if not any(line.y.any() for line in series):
        return []
    drawn = plot_lines(caption, runs, series, finish)
    silent = set(range(len(runs))) - without - {line.run for line in series}
    named = {f"Without {part}": without, "Not recorded by": silent}
    notes = [f"{words}: {', '.join(runs[n].label for n in sorted(those))}." for words, those in named.items() if those]
    kept = [note for note in drawn.notes if not note.startswith("Not recorded by")]
    return [replace(drawn, notes=(*notes, *kept))]


def _up_to_all(axes: Any) -> None:
    """Down to the lowest share: the whole axis would make every line one at its top."""
    low = min(axes.get_ylim()[0], 0.99)
    axes.set_ylim(low, 1 + 0.04 * (1 - low))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None, symbol=" %"))


def _from_zero(axes: Any) -> None:
    axes.set_ylim(bottom=0)


def _effective(step: StepRecord) -> float | None:
    return None if step.importance is None else step.importance.effective_share


def _live_agreement(step: StepRecord) -> float | None:
    return step.live_agreement[-1] if step.live_agreement else None


def _clipped(step: StepRecord) -> float | None:
    return step.clip_share


def _cut(step: StepRecord) -> float | None:
    return None if step.importance is None else step.importance.cut_share


def _rejected(step: StepRecord) -> float | None:
    return None if step.importance is None else float(step.importance.rejected_sequences)


def _divergence(step: StepRecord) -> float | None:
    return step.kl


def _trailing_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([values[max(0, end - WINDOW) : end].mean() for end in range(1, len(values) + 1)])


_EFFECTIVE = Caption(
    title="Effective sample size",
    sentence="Tokens of equal weight that would be worth as much as the trained ones, as a share of them; 100 % where "
    "trainer and rollout engine give every token the same probability.",
    x_label=STEP,
    y_label="share of trained tokens",
    absent=NEVER,
)
_LIVE = Caption(
    title="Live routes",
    sentence="Share of routing decisions in which the policy's own experts, in the last mini-batch of an update, are "
    "still the replayed ones.",
    x_label=STEP,
    y_label="share of routing decisions",
    absent=NEVER,
)
_CLIPPED = Caption(
    title="Clipped tokens",
    sentence="Share of trained tokens whose update the clip bounds changed.",
    x_label=STEP,
    y_label="share of trained tokens",
    absent=NEVER,
)
_CUT = Caption(
    title="Corrected tokens",
    sentence="Share of trained tokens whose importance weight was truncated or masked.",
    x_label=STEP,
    y_label="share of trained tokens",
    absent=NEVER,
)
_REJECTED = Caption(
    title="Rejected responses",
    sentence="Responses that were not learned from, because trainer and rollout engine disagree about them too much.",
    x_label=STEP,
    y_label="responses",
    absent=NEVER,
)
_DIVERGENCE = Caption(
    title="Distance to the reference",
    sentence="Estimate of KL(policy || reference) on the trained tokens.",
    x_label=STEP,
    y_label="nats per response token",
    absent=NEVER,
)
