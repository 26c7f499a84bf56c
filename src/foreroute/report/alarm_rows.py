"""The alarms and rollbacks of runs, in the words of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from foreroute.mismatch import Alarm, Kind
from foreroute.mismatch.alarms import WORDS
from foreroute.report.records import Run


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


def watched(runs: Sequence[Run]) -> list[str]:
    """The labels of the runs that recorded whether alarms were on."""
    return [run.label for run in runs if any(step.alarms is not None for step in run.steps)]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _episodes(run: Run, kind: str) -> list[tuple[list[int], Alarm]]:
    """Recorded steps in a row with an alarm of this kind, and the one of them that was worst."""
    episodes: list[tuple[list[int], Alarm]] = []
    going = False
    for step in run.steps:
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
