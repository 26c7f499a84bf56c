"""The tables of a run's page: a summary of each run, its alarms, and the load of its ranks. No plots.

A summary is numbers, for the page and for a terminal; alarms and loads are text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, get_args

from foreroute.mismatch import Alarm, Kind
from foreroute.mismatch.alarm_rules import WORDS
from foreroute.records import SIDES, ExecutionRecord, Load, Run, Side, StepRecord
from foreroute.report.format import ABSENT, TableRow, percentage, step_time

Measure = Literal["k3", "f2", "differing_share", "differing_tokens_share"]
BySide = dict[Side, float | None]
"""One measure without replay and with it. None: never measured."""
WINDOW = 10
"""Steps at each end of a run whose reward is averaged."""


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """The numbers of one run. Shares are between 0 and 1, k3 is in nats per response token, times are in seconds.

    `k3`, `f2`, `differing_share` (of routing decisions) and `differing_tokens_share` are means over the
    `paired_steps` steps at which both sides were measured. With `paired_steps` 0 each side is the mean over its own
    steps, and the two must not be compared.
    """

    run: str
    routing: str
    trains_with: Side
    steps: int
    reward_first: float | None
    reward_last: float | None
    paired_steps: int
    k3: BySide
    f2: BySide
    differing_share: BySide
    differing_tokens_share: BySide
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
        trains_with=run.trains_with,
        steps=len(run.steps),
        reward_first=_reward(run.steps[:WINDOW]),
        reward_last=_reward(run.steps[-WINDOW:]),
        paired_steps=len(run.paired_steps()),
        k3=_by_side(run, "k3"),
        f2=_by_side(run, "f2"),
        differing_share=_by_side(run, "differing_share"),
        differing_tokens_share=_by_side(run, "differing_tokens_share"),
        seconds_per_step=_mean(sum(seconds.values()) for seconds in timed),
        seconds_by_phase={phase: fmean(seconds.get(phase, 0.0) for seconds in timed) for phase in phases},
    )


def _reward(steps: Sequence[StepRecord]) -> float | None:
    return _mean(reward for step in steps if (reward := step.reward_mean) is not None)


def _by_side(run: Run, measure: Measure) -> BySide:
    return {side: _mean(getattr(step.mismatch[side], measure) for step in run.steps_to_compare(side)) for side in SIDES}


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fmean(known) if known else None


def alarm_rows(runs: Sequence[Run]) -> list[TableRow]:
    """For each run its alarms: the steps, what happened and what to do, and the value farthest from its limit."""
    rows = []
    for position, run in enumerate(runs):
        for kind in get_args(Kind):
            for steps, worst in _episodes(run, kind):
                cells = {
                    "Steps": f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0]),
                    "What happened": f"{WORDS[kind][:1].upper()}{WORDS[kind][1:]}.",
                    "Advice": worst.advice,
                    "Worst value": f"{worst.value:.3g}, limit {worst.threshold:.3g}",
                }
                rows.append(TableRow(position=position, label=run.label, cells=cells))
    return rows


def runs_with_alarms(runs: Sequence[Run]) -> list[str]:
    """The labels of the runs that recorded whether alarms were on."""
    return [run.label for run in runs if any(step.alarms is not None for step in run.steps)]


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


def load_rows(runs: Sequence[Run]) -> list[TableRow]:
    """A row for every run that was expert-parallel under a plan."""
    return [
        TableRow(position=position, label=run.label, cells=_cells([execution for _, execution in planned]))
        for position, run in enumerate(runs)
        if (planned := planned_steps(run))
    ]


def planned_steps(run: Run) -> list[tuple[int, ExecutionRecord]]:
    """The steps that ran under a plan, with their numbers."""
    return [(step.step, step.execution) for step in run.steps if step.execution and step.execution.stages]


def _cells(steps: Sequence[ExecutionRecord]) -> dict[str, str]:
    def mean(value: Callable[[ExecutionRecord], float]) -> float:
        return sum(map(value, steps)) / len(steps)

    def over_mean(load: Load) -> str:
        if any(load not in step.max_over_mean for step in steps):
            return ABSENT
        return f"{mean(lambda step: step.max_over_mean[load]):.2f}"

    def megabytes(*kinds: str) -> str:
        return f"{mean(lambda step: sum(step.bytes.get(kind, 0) for kind in kinds)) / 1e6:.3g} MB"

    planned, waited = ([getattr(step, name) or 0.0 for step in steps] for name in ("planning_s", "exposed_planning_s"))
    hidden_s = sum(max(0.0, planning_s - waited_s) for planning_s, waited_s in zip(planned, waited, strict=True))
    return {
        "Ranks": ", ".join(map(str, sorted({step.ranks for step in steps}))),
        "Busiest rank over mean, experts at home": over_mean("at_home"),
        "Busiest rank over mean, by the plan": over_mean("planned"),
        "Busiest rank over mean, as executed": over_mean("executed"),
        "Replicas": f"{mean(lambda step: step.replicas or 0):.0f}",
        "Weights moved": megabytes("host", "direct"),
        "Gradients moved": megabytes("gradients"),
        "Waited for transfers": step_time(mean(lambda step: step.exposed_transfer_s or 0.0)),
        "Waited for plans": step_time(mean(lambda step: step.exposed_planning_s or 0.0)),
        # of the time of planning, what no rank waited for
        "Planning that nothing waited for": percentage(hidden_s / sum(planned) if sum(planned) else None),
        "Cells that fell back to homes": str(
            sum(len(stage.fell_back) for step in steps for stage in step.stages.values())
        ),
    }
