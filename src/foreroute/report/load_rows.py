"""What expert-parallel runs did, averaged over their steps, in the words of a table. No plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foreroute.report.records import Execution, Run, Step
from foreroute.report.wording import ABSENT, percentage, seconds


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


def planned_steps(run: Run) -> list[tuple[Step, Execution]]:
    """The steps that ran under a plan."""
    return [(step, step.execution) for step in run.steps if step.execution is not None and step.execution.stages]


def _cells(steps: Sequence[Execution]) -> dict[str, str]:
    ranks = sorted({step.ranks for step in steps})
    fell_back = sum(step.cells_at_home for step in steps)
    return {
        "Ranks": ", ".join(map(str, ranks)),
        "Busiest rank, at home": f"{_mean(steps, lambda step: step.max_over_mean['at_home']):.2f}",
        "Busiest rank, planned": _planned(steps),
        "Busiest rank, executed": f"{_mean(steps, lambda step: step.max_over_mean['executed']):.2f}",
        "Replicas": f"{_mean(steps, lambda step: step.replicas):.0f}",
        "Weights moved": _megabytes(_mean(steps, lambda step: step.bytes.get("host", 0) + step.bytes.get("direct", 0))),
        "Gradients moved": _megabytes(_mean(steps, lambda step: step.bytes.get("gradients", 0))),
        "Waited for transfers": seconds(_mean(steps, lambda step: step.exposed_transfer_s)),
        "Waited for plans": seconds(_mean(steps, lambda step: step.exposed_planning_s)),
        "Planning hidden": percentage(_hidden(steps)),
        "Cells fallen back": str(fell_back),
    }


def _planned(steps: Sequence[Execution]) -> str:
    if any("planned" not in step.max_over_mean for step in steps):
        return ABSENT
    return f"{_mean(steps, lambda step: step.max_over_mean['planned']):.2f}"


def _hidden(steps: Sequence[Execution]) -> float | None:
    """Share of the time of planning that no rank waited for."""
    planning_s = sum(step.planning_s for step in steps)
    hidden_s = sum(step.planning_s * step.hidden_planning_share for step in steps)
    return hidden_s / planning_s if planning_s else None


def _mean(steps: Sequence[Execution], value: Callable[[Execution], float]) -> float:
    return sum(map(value, steps)) / len(steps)


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3g} MB"
