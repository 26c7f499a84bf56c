"""Alarms over a run's records: the collapse rule that was fixed beforehand, and early warnings. Pure functions.

A record is one line of metrics.jsonl. `docs/diagnose.md` says where each threshold comes from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Kind = Literal["collapse", "f2", "disagreement", "stale_routes", "effective_share"]
"""What an alarm is about. The constants below say when each goes off."""


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


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """What went off.

    Attributes:
        kind: of the alarm.
        since: the first step whose figures it rests on.
        value: what was seen.
        threshold: that it passed.
    """

    kind: Kind
    since: int
    value: float
    threshold: float

    @property
    def advice(self) -> str:
        """What to do about it."""
        return ADVICE[self.kind]

    def __str__(self) -> str:
        """In words, with the figures."""
        return f"{WORDS[self.kind]} (since step {self.since}: {self.value:.3g}, limit {self.threshold:.3g})"


WORDS: dict[str, str] = {
    "collapse": "reward has collapsed, or the loss is not finite",
    "f2": "too many tokens are far apart in trainer and engine, F(2)",
    "disagreement": "routing disagreement of trainer and engine has grown",
    "stale_routes": "replayed routes are no longer those that the policy would take",
    "effective_share": "importance weights leave few effective samples",
}


ADVICE: dict[str, str] = {
    "collapse": "Start again from a checkpoint from before it (warm_start.checkpoint), with a lower rl.learning_rate "
    "or fewer rl.mini_steps.",
    "f2": 'Train with replay (rl.routing = "R3") if the run does not. If it does, routing is not the cause: run '
    "foreroute doctor on a saved rollout, and check that the engine has the last weights, the temperature and the "
    "precision that you meant.",
    "disagreement": 'Train with replay (rl.routing = "R3"), or check with foreroute doctor that the engine gets every '
    "update's weights. A run that replays may go on as long as F(2) and the reward hold.",
    "stale_routes": "Lower rl.learning_rate or rl.mini_steps, so that an update moves the policy less. A run whose "
    "held-out reward rises may go on; only runs that replay can have this alarm, so it does not speak against replay.",
    "effective_share": "Lower rl.learning_rate or rl.mini_steps, or bound the weights with rl.correction.",
}
"""What to do, by kind, in the keys of `foreroute train`."""


@dataclass(frozen=True, kw_only=True)
class Signals:
    """The figures of one step that alarms look at; None where it was not measured."""

    step: int
    reward: float | None = None
    loss: float | None = None
    f2: float | None = None
    disagreement: float | None = None
    live_agreement: float | None = None
    effective_share: float | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Signals:
        """Those of a record. F(2) is that of the routes which the step trained with."""
        mismatch = record.get("mismatch", {})
        live = record.get("live_agreement", [])
        share = record.get("importance", {}).get("effective_share")
        return cls(
            step=record["step"],
            reward=record.get("reward_mean"),
            loss=record.get("loss"),
            f2=mismatch.get(record.get("trained_with"), {}).get("f2"),
            disagreement=mismatch.get("native", {}).get("differing_share"),
            live_agreement=live[-1] if live else None,
            # 0 is that of no tokens: nothing was trained. Where weights overflow, no sample is left
            effective_share=(share if math.isfinite(share) else 0.0) if share else None,
        )


def alarms(history: Sequence[Signals]) -> list[Alarm]:
    """The alarms that are on after the last step of a run.

    Args:
        history: all its steps so far, in order. Before the first, none is on.
    """
    if not history:
        return []
    _, shares = _measured(history, "disagreement")
    # no shares make no mean, and then no alarm
    grown = DISAGREEMENT_GROWTH * float(np.mean(shares[:WINDOW] or [0.0]))
    found = [
        _collapse(history),
        _mean_passes("f2", "f2", history, above=F2_ABOVE),
        _mean_passes("disagreement", "disagreement", history, above=max(DISAGREEMENT_ABOVE, grown)),
        _mean_passes("stale_routes", "live_agreement", history, below=AGREEMENT_BELOW),
        _mean_passes("effective_share", "effective_share", history, below=EFFECTIVE_SHARE_BELOW),
    ]
    return [alarm for alarm in found if alarm is not None]


def _collapse(history: Sequence[Signals]) -> Alarm | None:
    last = history[-1]
    if last.loss is not None and not math.isfinite(last.loss):
        return Alarm(kind="collapse", since=last.step, value=last.loss, threshold=math.inf)
    steps, rewards = _measured(history, "reward")
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
    return Alarm(kind="collapse", since=steps[first], value=float(means[-1]), threshold=float(limits[-1]))


def _mean_passes(
    kind: Kind, signal: str, history: Sequence[Signals], *, above: float = math.inf, below: float = -math.inf
) -> Alarm | None:
    """An alarm where the mean of a signal's last measurements is too high or low, until the next step that measures."""
    steps, values = _measured(history, signal)
    if len(values) < WINDOW:
        return None
    mean = float(np.mean(values[-WINDOW:]))
    if not (mean > above or mean < below):
        return None
    return Alarm(kind=kind, since=steps[-WINDOW], value=mean, threshold=above if mean > above else below)


def _measured(history: Sequence[Signals], signal: str) -> tuple[list[int], list[float]]:
    """The steps that measured a signal, and what they saw.

    A mean of nothing is NaN, which is no measurement: in a window or a running maximum it would silence the alarm.
    """
    pairs = [(each.step, getattr(each, signal)) for each in history]
    seen = [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]
    return [step for step, _ in seen], [value for _, value in seen]
