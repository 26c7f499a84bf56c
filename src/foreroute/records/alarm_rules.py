"""Alarms over the records of a run: the collapse rule that was fixed beforehand, and early warnings.

`docs/diagnose.md` says where each threshold comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from foreroute.records.step_record import Alarm, AlarmName, Side, StepRecord

WINDOW = 10
"""Measurements in a mean. Means are over the last ones, and over no fewer."""
COLLAPSE_BELOW, COLLAPSE_FOR = 0.5, 10
"""collapse: the mean reward is below this share of its running maximum, for this many steps in a row; or the loss is
not finite."""
F2_ABOVE = 0.1
"""f2: share of response tokens whose probabilities in trainer and engine differ more than twofold."""
DISAGREEMENT_GROWTH, DISAGREEMENT_ABOVE = 2.0, 0.1
"""disagreement: the share of (token, layer) that the trainer by itself routes otherwise than the engine is more than so
many times that of the run's first `WINDOW` measurements, and more than this."""
AGREEMENT_BELOW = 0.88
"""stale_routes: share of (token, layer) whose live top-k is the replayed set, in the last mini-batch of an update."""
EFFECTIVE_SHARE_BELOW = 0.5
"""effective_share: effective sample size of the importance weights, over the tokens."""

Measured = tuple[list[int], list[float]]
"""The steps that measured a figure, and what they saw."""


def alarms(history: Sequence[StepRecord]) -> list[Alarm]:
    """Give the alarms that are on after the last step of a run, by the records of all its steps so far, in order."""
    if not history:
        return []
    f2 = _measured(history, lambda step: _of_side(step, step.trained_with, "f2"))
    disagreement = _measured(history, lambda step: _of_side(step, "native", "differing_share"))
    # in the last mini-batch, whose weights are farthest from the rollout's
    agreement = _measured(history, lambda step: step.live_agreement[-1] if step.live_agreement else None)
    # no shares make no mean, and then no alarm
    grown = DISAGREEMENT_GROWTH * float(np.mean(disagreement[1][:WINDOW] or [0.0]))
    found = [
        _collapse(history),
        _mean_passes("f2", f2, above=F2_ABOVE),
        _mean_passes("disagreement", disagreement, above=max(DISAGREEMENT_ABOVE, grown)),
        _mean_passes("stale_routes", agreement, below=AGREEMENT_BELOW),
        _mean_passes("effective_share", _measured(history, _effective_share), below=EFFECTIVE_SHARE_BELOW),
        _suspicious(history),
    ]
    return [alarm for alarm in found if alarm is not None]


def _collapse(history: Sequence[StepRecord]) -> Alarm | None:
    """Give the alarm of a loss that is not finite, or of a mean reward that stays below half of its maximum."""
    last = history[-1]
    if last.loss is not None and not math.isfinite(last.loss):
        return Alarm(name="collapse", since=last.step, value=last.loss, threshold=math.inf)
    steps, rewards = _measured(history, lambda step: step.reward_mean)
    if len(rewards) < WINDOW:
        return None
    means = sliding_window_view(rewards, WINDOW).mean(axis=-1)
    limits = COLLAPSE_BELOW * np.maximum.accumulate(means)
    # a maximum of 0 or below has no half that could be fallen short of
    low = (means < limits) & (limits > 0)
    if len(low) < COLLAPSE_FOR or not low[-COLLAPSE_FOR:].all():
        return None
    # the first mean is its own maximum, so that it is never low
    first = len(low) - int(low[::-1].argmin())
    return Alarm(name="collapse", since=steps[first], value=float(means[-1]), threshold=float(limits[-1]))


def _mean_passes(
    name: AlarmName, measured: Measured, *, above: float = math.inf, below: float = -math.inf
) -> Alarm | None:
    """Give an alarm where the mean of the last measurements is too high or low; it stays until the next one."""
    steps, values = measured
    if len(values) < WINDOW:
        return None
    mean = float(np.mean(values[-WINDOW:]))
    if not (mean > above or mean < below):
        return None
    return Alarm(name=name, since=steps[-WINDOW], value=mean, threshold=above if mean > above else below)


def _suspicious(history: Sequence[StepRecord]) -> Alarm | None:
    """Give the alarm of a step whose rows the sentinel suspects, since the first step in a row with some."""
    if not (suspicions := history[-1].suspicions):
        return None
    since = next((each.step + 1 for each in reversed(history) if not each.suspicions), history[0].step)
    worst = max(suspicions, key=lambda each: each.share)
    return Alarm(name="sentinel", since=since, value=worst.share, threshold=worst.usual or 0.0)


def _measured(history: Sequence[StepRecord], figure: Callable[[StepRecord], float | None]) -> Measured:
    """Collect a figure of the steps that measured it."""
    pairs = [(each.step, figure(each)) for each in history]
    # a mean of nothing is NaN, which is no measurement: in a window or a running maximum it would silence the alarm
    seen = [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]
    return [step for step, _ in seen], [value for _, value in seen]


def _of_side(step: StepRecord, side: Side | None, figure: str) -> float | None:
    """Give a figure of the mismatch of a side, where that was measured."""
    return None if side is None else getattr(step.mismatch.get(side), figure, None)


def _effective_share(step: StepRecord) -> float | None:
    """Effective share of samples; none of a step that trained on no token, whose share is 0."""
    share = step.importance.effective_share if step.importance is not None else 0.0
    # where weights overflow, no sample is left
    return (share if math.isfinite(share) else 0.0) if share else None
