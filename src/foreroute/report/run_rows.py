"""The tables of a run's page: a summary of each run, its alarms, and the load of its ranks. No plots.

A summary is numbers, for the page and for a terminal; alarms and loads are text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import get_args

from foreroute.mismatch import Alarm, Kind
from foreroute.mismatch.alarm_rules import WORDS
from foreroute.report.format import ABSENT, percentage, seconds
from foreroute.report.records import ExecutionRecord, Mismatch, Run, Side, StepRecord

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


def _reward(steps: Sequence[StepRecord]) -> float | None:
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


@dataclass(frozen=True, kw_only=True)
class AlarmRow:
    """An alarm that was on for some steps in a row, or a rollback.

    Attributes:
        position: of the run in the report.
        run: its label.
        steps: as text.
        what: happened.
        advice: what to do.
        figures: value and limit where it was farthest from it, as text.
    """

    position: int
    run: str
    steps: str
    what: str
    advice: str = ""
    figures: str = ""


def alarm_rows(runs: Sequence[Run]) -> list[AlarmRow]:
    """For each run its rollbacks, whose own steps are no longer part of it, then its alarms."""
    rows = []
    for position, run in enumerate(runs):
        for back in run.rollbacks:
            what = f"Rolled back to step {back.to_step}, and on with replay and other data. {_sentence(back.because)}"
            rows.append(AlarmRow(position=position, run=run.label, steps=str(back.at_step), what=what))
        for kind in get_args(Kind):
            for steps, worst in _episodes(run, kind):
                rows.append(
                    AlarmRow(
                        position=position,
                        run=run.label,
                        steps=f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0]),
                        what=_sentence(WORDS[kind]),
                        advice=worst.advice,
                        figures=f"{worst.value:.3g}, limit {worst.threshold:.3g}",
                    )
                )
    return rows


def runs_with_alarms(runs: Sequence[Run]) -> list[str]:
    """The labels of the runs that recorded whether alarms were on."""
    return [run.label for run in runs if any(step.alarms is not None for step in run.steps)]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _episodes(run: Run, kind: str) -> list[tuple[list[int], Alarm]]:
    """Recorded steps in a row with an alarm of this kind, and the one of them that was worst."""
    episodes: list[tuple[list[int], Alarm]] = []
    going = False
    for step in run.steps:
        # A step without alarms ends an episode, whatever comes after it.
        here = [alarm for alarm in step.alarms or () if alarm.kind == kind]
        if here and going:
            steps, worst = episodes[-1]
            episodes[-1] = ([*steps, step.step], max(worst, here[0], key=_excess))
        elif here:
            episodes.append(([step.step], here[0]))
        going = bool(here)
    return episodes


def _excess(alarm: Alarm) -> float:
    return abs(alarm.value - alarm.threshold)


@dataclass(frozen=True, kw_only=True)
class LoadRow:
    """One expert-parallel run.

    Attributes:
        position: of the run in the report.
        run: its label.
        cells: of the table, by heading, as text.
    """

    position: int
    run: str
    cells: dict[str, str]


def load_rows(runs: Sequence[Run]) -> list[LoadRow]:
    """A row for every run that was expert-parallel under a plan."""
    return [
        LoadRow(position=position, run=run.label, cells=_cells([execution for _, execution in planned]))
        for position, run in enumerate(runs)
        if (planned := planned_steps(run))
    ]


def planned_steps(run: Run) -> list[tuple[StepRecord, ExecutionRecord]]:
    """The steps that ran under a plan."""
    return [(step, step.execution) for step in run.steps if step.execution is not None and step.execution.stages]


def _cells(steps: Sequence[ExecutionRecord]) -> dict[str, str]:
    ranks = sorted({step.ranks for step in steps})
    fell_back = sum(step.cells_at_home for step in steps)
    return {
        "Ranks": ", ".join(map(str, ranks)),
        "Busiest rank, at home": f"{_mean_of(steps, lambda step: step.max_over_mean['at_home']):.2f}",
        "Busiest rank, planned": _planned(steps),
        "Busiest rank, executed": f"{_mean_of(steps, lambda step: step.max_over_mean['executed']):.2f}",
        "Replicas": f"{_mean_of(steps, lambda step: step.replicas):.0f}",
        "Weights moved": _megabytes(_mean_of(steps, _weight_bytes)),
        "Gradients moved": _megabytes(_mean_of(steps, lambda step: step.bytes.get("gradients", 0))),
        "Waited for transfers": seconds(_mean_of(steps, lambda step: step.exposed_transfer_s)),
        "Waited for plans": seconds(_mean_of(steps, lambda step: step.exposed_planning_s)),
        "Planning hidden": percentage(_hidden(steps)),
        "Cells fallen back": str(fell_back),
    }


def _weight_bytes(step: ExecutionRecord) -> int:
    return step.bytes.get("host", 0) + step.bytes.get("direct", 0)


def _planned(steps: Sequence[ExecutionRecord]) -> str:
    if any("planned" not in step.max_over_mean for step in steps):
        return ABSENT
    return f"{_mean_of(steps, lambda step: step.max_over_mean['planned']):.2f}"


def _hidden(steps: Sequence[ExecutionRecord]) -> float | None:
    """Share of the time of planning that no rank waited for."""
    planning_s = sum(step.planning_s for step in steps)
    hidden_s = sum(step.planning_s * step.hidden_planning_share for step in steps)
    return hidden_s / planning_s if planning_s else None


def _mean_of(steps: Sequence[ExecutionRecord], value: Callable[[ExecutionRecord], float]) -> float:
    return sum(map(value, steps)) / len(steps)


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3g} MB"
