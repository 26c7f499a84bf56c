"""What a plan and other balancers reach, as words and as rows of a table for a terminal or a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foreroute.report.wording import GAP, duration, percentage

if TYPE_CHECKING:  # they load compiled code
    from foreroute.costs.figures import StepSummary
    from foreroute.plan.step_plan import StepPlan
    from foreroute.planner.compare import BalancerRecord

UNBALANCED = ("static", "by_length")
"""Names of the records that serve every expert at its home."""


@dataclass(frozen=True)
class MethodRow:
    """One method. Cells are text, empty where there is nothing to say.

    Attributes:
        label: its name.
        mean, p99, worst: load of the slowest rank over the mean, over cells.
        seconds: modelled time of the step.
        gain: of static, over this one.
        moves: experts moved per cell.
        homes: experts that change their home before the step.
        crossing: share of assignments served on another node.
        planning: time of planning.
        ours: whether it is the plan at hand.
    """

    label: str
    mean: str
    p99: str
    worst: str
    seconds: str
    gain: str
    moves: str
    homes: str
    crossing: str
    planning: str
    ours: bool = False


def method_rows(records: Sequence[BalancerRecord], survey: StepSummary) -> list[MethodRow]:
    """One row per record, the last of which is ours, and one for what no plan can beat."""
    static_s = survey.before.seconds
    rows = [
        MethodRow(
            label=record.label,
            mean=over_mean(record.imbalance_mean),
            p99=over_mean(record.imbalance_p99),
            worst=over_mean(record.imbalance_worst),
            seconds=step_seconds(record.seconds),
            gain=f"{static_s / record.seconds:.2f}",
            moves=f"{record.fetches_per_cell:.1f}",
            homes=f"{record.home_moves:,}",
            crossing=f"{record.cross_node_share:.0%}",
            planning=duration(record.planning_s) if record.name not in UNBALANCED else "",
            ours=record is records[-1],
        )
        for record in records
    ]
    bound = survey.bound_ML
    limits = (over_mean(float(bound.mean())), over_mean(float(np.quantile(bound, 0.99))), over_mean(float(bound.max())))
    least_s = survey.least_seconds
    last = MethodRow("no plan beats", *limits, step_seconds(least_s), f"{static_s / least_s:.2f}", "", "", "", "")
    return [*rows, last]


def plan_summary(plan: StepPlan, survey: StepSummary) -> list[str]:
    """What the step is like and what the plan does, in sentences."""
    before, after = survey.before, survey.after
    cells = survey.fetched_ML.size
    away = [f"The experts of a micro-step differ from those of its step by {_mean(survey.fluctuation_ML)}"]
    if survey.drift_L is not None:
        away.append(f"those of the step from the step before by {_mean(survey.drift_L)}")
    slowest = [over_mean(float(side.imbalance_ML.mean())) for side in (before, after)]
    return [
        f"{', '.join(away)} of the assignments.",
        f"The slowest rank has {slowest[0]} times the mean load without balancing and {slowest[1]} times under the "
        f"plan, on average over {cells:,} cells.",
        f"A cell has {len(plan.expert_R) / cells:.1f} replicas, of which {survey.fetched_ML.mean():.1f} are fetched "
        f"for it; {len(plan.home_moves):,} experts change their home.{_crossing(before.crossing, after.crossing)}",
        f"Modelled, not measured: {step_time(before.seconds)} without balancing, {step_time(after.seconds)} "
        f"under the plan ({before.seconds / after.seconds:.2f} times as fast), at least "
        f"{step_time(survey.least_seconds)} under any.",
    ]


def strongest_rival(records: Sequence[BalancerRecord]) -> BalancerRecord | None:
    """Of all methods but static and the plan at hand, which is the last record, the one with the fastest step."""
    others = [record for record in records[:-1] if record.name not in UNBALANCED]
    return min(others, key=lambda record: record.seconds, default=None)


def _crossing(before: float, after: float) -> str:
    """Nothing where all ranks are on one node."""
    if not (before or after):
        return ""
    return (
        f" Assignments that are served on another node than their token's are {percentage(before)} without balancing "
        f"and {percentage(after)} under the plan."
    )


def _mean(share_X: NDArray[np.float64]) -> str:
    known = share_X[np.isfinite(share_X)]
    return percentage(float(known.mean()) if known.size else None)


def step_seconds(value: float) -> str:
    """Seconds of a step with three digits, or as many as whole seconds take."""
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f}" if value >= 0.1 else f"{value:#.3g}"


def step_time(value: float) -> str:
    """The same with its unit; short ones in milliseconds."""
    return f"{step_seconds(value)}{GAP}s" if value >= 0.1 else duration(value)


def over_mean(value: float) -> str:
    """A load over the mean, with as many decimals as tell it from 1."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
