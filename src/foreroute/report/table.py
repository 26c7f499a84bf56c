"""One plain row of numbers per run, for the page and for a terminal. Nothing is formatted here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from foreroute.report.records import Mismatch, Run, Side, Step

WINDOW = 10
"""Steps at each end of a run whose reward is averaged."""


@dataclass(frozen=True)
class Sides:
    """One measure without replay and with it. None: never measured."""

    native: float | None
    replayed: float | None


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """The numbers of one run. Shares are between 0 and 1, k3 is in nats per response token, times are in seconds.

    `k3`, `f2`, `differing_share` (of routing decisions) and `differing_tokens_share` are means over the
    `paired_steps` steps at which both sides were measured. With `paired_steps` 0 each side is the mean over its own
    steps, and the two must not be compared.
    """

    run: str
    routing: str
    precision: str
    trains_with: Side
    steps: int
    reward_first: float | None
    reward_last: float | None
    paired_steps: int
    k3: Sides
    f2: Sides
    differing_share: Sides
    differing_tokens_share: Sides
    seconds_per_step: float | None
    seconds_by_phase: dict[str, float]


def summary_rows(runs: Sequence[Run]) -> list[SummaryRow]:
    """One row per run, in order."""
    return [_row(run) for run in runs]


def _row(run: Run) -> SummaryRow:
    timed = [step.seconds for step in run.steps if step.seconds]
    phases = list(dict.fromkeys(phase for seconds in timed for phase in seconds))
    return SummaryRow(
        run=run.label,
        routing=run.routing,
        precision=run.precision,
        trains_with=run.trains_with,
        steps=len(run.steps),
        reward_first=_reward(run.steps[:WINDOW]),
        reward_last=_reward(run.steps[-WINDOW:]),
        paired_steps=len(run.paired_steps()),
        k3=_sides(run, "k3"),
        f2=_sides(run, "f2"),
        differing_share=_sides(run, "differing_share"),
        differing_tokens_share=_sides(run, "differing_tokens_share"),
        seconds_per_step=_mean(sum(seconds.values()) for seconds in timed),
        seconds_by_phase={phase: fmean(seconds.get(phase, 0.0) for seconds in timed) for phase in phases},
    )


def _reward(steps: Sequence[Step]) -> float | None:
    return _mean(step.reward_mean for step in steps if step.reward_mean is not None)


def _sides(run: Run, measure: str) -> Sides:
    def mean(side: Side) -> float | None:
        return _mean(_value(step.mismatch[side], measure) for step in run.steps_to_compare(side))

    return Sides(mean("native"), mean("replayed"))


def _value(mismatch: Mismatch, measure: str) -> float:
    return float(getattr(mismatch, measure))


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None
