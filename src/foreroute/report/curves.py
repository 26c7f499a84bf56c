"""The plots over steps: reward, entropy, gradient norm, mismatch, routing disagreement, expert load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from foreroute.report.canvas import TALL_INCHES, Caption, Plot, Series, percent_axis, plot, plot_figure, whole_ticks
from foreroute.report.records import SIDES, Mismatch, Run, Step
from foreroute.report.table import WINDOW

STEP = "training step"


def reward(runs: Sequence[Run]) -> Plot:
    caption = Caption(
        title="Reward",
        sentence=f"Mean reward of the responses of each step (thin) and its mean over the last {WINDOW} steps (thick).",
        x_label=STEP,
        y_label="mean reward",
        absent="No reward was recorded (reward_mean).",
    )
    series = per_run(runs, lambda step: step.reward_mean)

    def draw(axes: Any) -> None:
        for line in series:
            axes.plot(line.x, line.y, **line.look | {"marker": None, "linewidth": 0.8, "alpha": 0.4})
            axes.plot(line.x, _trailing_mean(line.y), **line.look | {"linewidth": 2.2})
        axes.xaxis.set_major_locator(whole_ticks(6))

    return plot(caption, runs, series, draw)


def held_out_reward(runs: Sequence[Run]) -> list[Plot]:
    """One plot, or none where nothing was evaluated."""
    series = per_run(runs, lambda step: step.evaluation.reward_mean if step.evaluation else None)
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
            axes.plot(line.x, line.y, **line.look | {"marker": "o", "markersize": 4})
        axes.xaxis.set_major_locator(whole_ticks(6))

    return [plot(caption, runs, series, draw)]


def entropy(runs: Sequence[Run]) -> Plot:
    caption = Caption(
        title="Entropy",
        sentence="Mean entropy of the trainer's next-token distribution; near zero, exploration has ended.",
        x_label=STEP,
        y_label="nats per response token",
        absent="No entropy was recorded.",
    )
    return lines(caption, runs, per_run(runs, lambda step: step.entropy))


def gradient_norm(runs: Sequence[Run]) -> Plot:
    caption = Caption(
        title="Gradient norm",
        sentence="Norm of the gradient, averaged over the mini-steps of a step; spikes are unstable updates.",
        x_label=STEP,
        y_label="norm, before clipping",
        absent="No gradient norm was recorded (grad_norm).",
    )
    return lines(caption, runs, per_run(runs, lambda step: step.grad_norm))


def k3(runs: Sequence[Run]) -> Plot:
    series = _per_side(runs, lambda mismatch: mismatch.k3)
    values = np.concatenate([line.y for line in series]) if series else np.zeros(0)
    positive = values[np.isfinite(values) & (values > 0)]
    floor = 10.0 ** np.floor(np.log10(positive.min())) if positive.size else None
    floor_text = f"1e{np.log10(floor):.0f}" if floor else ""
    zeros = bool((values <= 0).any())
    caption = Caption(
        title="Mismatch of trainer and rollout engine (k3)",
        sentence="k3 estimates KL(rollout engine || trainer) on the sampled response tokens"
        + (
            f" (logarithmic above {floor_text}, linear below it so that zero can be shown)." if floor and zeros else "."
        ),
        x_label=STEP,
        y_label="k3, nats per response token",
        absent="No mismatch was recorded.",
    )

    def finish(axes: Any) -> None:
        if floor and zeros:
            axes.set_yscale("symlog", linthresh=floor, linscale=0.4)
        elif floor:
            axes.set_yscale("log")
        if zeros:  # a line of exact zeros would vanish in the axis
            axes.set_ylim(bottom=-(floor or 1.0) * 0.25)

    return lines(caption, runs, series, finish)


def f2(runs: Sequence[Run]) -> Plot:
    caption = Caption(
        title="Tokens far apart, F(2)",
        sentence="Share of response tokens whose probabilities in trainer and rollout engine differ more than twofold.",
        x_label=STEP,
        y_label="share of response tokens",
        absent="No mismatch was recorded.",
    )
    return lines(caption, runs, _per_side(runs, lambda mismatch: mismatch.f2), percent_axis)


def disagreement(runs: Sequence[Run]) -> Plot:
    caption = Caption(
        title="Routing disagreement",
        sentence="Share of routing decisions in which trainer and rollout engine use different sets of experts.",
        x_label=STEP,
        y_label="share of routing decisions",
        absent="No mismatch was recorded.",
    )
    return lines(caption, runs, _per_side(runs, lambda mismatch: mismatch.differing_share), percent_axis)


def expert_load(runs: Sequence[Run]) -> Plot:
    ranks = sorted({rank for run in runs for step in run.steps for rank in step.expert_load})
    rows = {rank: per_run(runs, lambda step, rank=rank: step.expert_load.get(rank)) for rank in ranks}  # type: ignore[misc]
    caption = Caption(
        title="Expert load",
        sentence="Tokens of the busiest rank over the mean of all ranks if experts lay contiguously on that many ranks "
        "(1 is perfect balance), averaged over micro-steps and layers.",
        x_label=STEP,
        y_label="busiest rank over mean",
        absent="No expert load was recorded (expert_load).",
    )

    def fill(figure: Figure) -> None:
        panels = figure.subplots(len(ranks), sharex=True, squeeze=False)[:, 0]
        for axes, rank in zip(panels, ranks, strict=True):
            for line in rows[rank]:
                axes.plot(line.x, line.y, **line.look)
            axes.set_title(f"{rank} ranks", loc="left", fontsize=10.5, color="#3b4550", pad=3)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
        panels[-1].xaxis.set_major_locator(whole_ticks(6))
        panels[-1].set_xlabel(caption.x_label)
        figure.supylabel(caption.y_label, fontsize=11, color="#3b4550")

    return plot_figure(caption, runs, [line for lines in rows.values() for line in lines], fill, TALL_INCHES)


def lines(
    caption: Caption, runs: Sequence[Run], series: Sequence[Series], finish: Callable[[Any], None] = lambda axes: None
) -> Plot:
    def draw(axes: Any) -> None:
        for line in series:
            axes.plot(line.x, line.y, **line.look)
        axes.xaxis.set_major_locator(whole_ticks(6))
        finish(axes)

    return plot(caption, runs, series, draw)


def per_run(runs: Sequence[Run], value: Callable[[Step], float | None]) -> list[Series]:
    found = [[(step.step, value(step)) for step in run.steps] for run in runs]
    return [
        Series(position, None, *_columns([(x, y) for x, y in points if y is not None]))
        for position, points in enumerate(found)
        if any(y is not None for _, y in points)
    ]


def _per_side(runs: Sequence[Run], value: Callable[[Mismatch], float]) -> list[Series]:
    return [
        Series(position, side, *_columns(points))
        for position, run in enumerate(runs)
        for side in SIDES
        if (points := [(step.step, value(step.mismatch[side])) for step in run.steps if side in step.mismatch])
    ]


def _columns(points: Sequence[tuple[int, float]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    array = np.array(points, np.float64)
    return array[:, 0], array[:, 1]


def _trailing_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([values[max(0, end - WINDOW) : end].mean() for end in range(1, len(values) + 1)])
