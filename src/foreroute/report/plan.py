"""A plan, what it was made for and what else was tried -> a table for a terminal, sentences, one HTML page.

It computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreroute.report.format import TableRow, duration, over_mean, percentage, step_seconds, step_time
from foreroute.report.template import write_html

if TYPE_CHECKING:  # they load compiled code
    from foreroute.costs.figures import StepSummary
    from foreroute.plan.step_plan import StepPlan
    from foreroute.planner.compare import BalancerRecord
    from foreroute.trace import RoutedLayer

UNBALANCED = ("static", "by_length")
"""Names of the records that serve every expert at its home, so that they plan nothing."""


def write_plan_page(
    plan: StepPlan,
    summary: StepSummary,
    records: Sequence[BalancerRecord],
    facts: Mapping[str, str],
    target: Path,
    *,
    layers: Sequence[RoutedLayer] = (),
) -> Path:
    """Write the page; one that is there is replaced.

    Args:
        plan: the plan.
        summary: of its step.
        records: of the methods to compare, the plan's own last.
        facts: what was planned and how, by name.
        target: the file to write.
        layers: L, where the model's own numbers of them are known.

    Raises:
        InputError: when `target` cannot be written or is no page of ours, or the `report` extra is not installed.
    """
    return write_html(target, "plan.html.j2", lambda: _values(plan, summary, records, facts, layers))


def method_rows(records: Sequence[BalancerRecord], summary: StepSummary) -> list[TableRow]:
    """One row per record, the last of which is ours, and one for what no plan can beat; `BalancerRecord` has more."""
    static_s, bound = summary.before.seconds, summary.bound_ML
    rows = []
    for record in records:
        cells = {
            "Over mean": over_mean(record.imbalance_mean),
            "p99": over_mean(record.imbalance_p99),
            "Worst": over_mean(record.imbalance_worst),
            "Modelled s": step_seconds(record.seconds),
            "Static / this": f"{static_s / record.seconds:.2f}",
            "Moves a cell": f"{record.fetches_per_cell:.1f}",
            "Home moves": f"{record.home_moves:,}",
            "Other node": f"{record.cross_node_share:.0%}",
            "Planned in": duration(record.planning_s) if record.name not in UNBALANCED else "",
        }
        rows.append(TableRow(label=record.label, cells=cells, ours=record is records[-1]))
    limits = {
        "Over mean": over_mean(float(bound.mean())),
        "p99": over_mean(float(np.quantile(bound, 0.99))),
        "Worst": over_mean(float(bound.max())),
        "Modelled s": step_seconds(summary.least_seconds),
        "Static / this": f"{static_s / summary.least_seconds:.2f}",
    }
    return [*rows, TableRow(label="no plan beats", cells=limits)]


def plan_summary(plan: StepPlan, summary: StepSummary) -> list[str]:
    """What the step is like and what the plan does, in sentences."""
    before, after = summary.before, summary.after
    cells = summary.fetched_ML.size
    away = [f"The experts of a micro-step differ from those of its step by {_mean(summary.fluctuation_ML)}"]
    if summary.drift_L is not None:
        away.append(f"those of the step from the step before by {_mean(summary.drift_L)}")
    slowest = [over_mean(float(side.imbalance_ML.mean())) for side in (before, after)]
    return [
        f"{', '.join(away)} of the assignments.",
        f"The slowest rank has {slowest[0]} times the mean load without balancing and {slowest[1]} times under the "
        f"plan, on average over {cells:,} cells.",
        f"A cell has {len(plan.expert_R) / cells:.1f} replicas, of which {summary.fetched_ML.mean():.1f} are fetched "
        f"for it; {len(plan.home_moves):,} experts change their home.{_crossing(before.crossing, after.crossing)}",
        f"Modelled, not measured: {step_time(before.seconds)} without balancing, {step_time(after.seconds)} "
        f"under the plan ({before.seconds / after.seconds:.2f} times as fast), at least "
        f"{step_time(summary.least_seconds)} under any.",
    ]


def _values(
    plan: StepPlan,
    summary: StepSummary,
    records: Sequence[BalancerRecord],
    facts: Mapping[str, str],
    layers: Sequence[RoutedLayer],
) -> dict[str, Any]:
    from foreroute.report import plan_plots

    rows = method_rows(records, summary)
    sections = (
        ("What the step is like", (plan_plots.stability(summary, layers), plan_plots.by_layer(summary, layers))),
        (
            "Loads before and after",
            (plan_plots.load_of_ranks(summary, layers), plan_plots.load_of_cells(summary, layers)),
        ),
        (
            "What the plan does",
            (
                plan_plots.gap_to_bound(summary),
                plan_plots.replicas(plan, summary),
                plan_plots.cross_node_traffic(summary),
                plan_plots.time_by_part(summary),
            ),
        ),
    )
    return {
        "facts": facts,
        "tiles": _tiles(summary, records),
        "sentences": plan_summary(plan, summary),
        "sections": sections,
        "columns": list(rows[0].cells),
        "rows": rows,
        "methods": plan_plots.by_method(records, summary),
    }


def _tiles(summary: StepSummary, records: Sequence[BalancerRecord]) -> list[tuple[str, str, str]]:
    """Name, value under the plan, and what it is to be seen against."""
    before, after = summary.before, summary.after
    mean_before, mean_after = (over_mean(float(side.imbalance_ML.mean())) for side in (before, after))
    against = f"{step_time(before.seconds)} without balancing"
    if (rival := strongest_rival(records)) is not None:
        against += f", {step_time(rival.seconds)} with {rival.label}"
    return [
        ("slowest rank over mean", mean_after, f"{mean_before} without balancing"),
        ("time of the step, modelled", step_time(after.seconds), against),
        (
            "assignments that cross nodes",
            percentage(after.crossing),
            f"{percentage(before.crossing)} without balancing",
        ),
        ("experts fetched per cell", f"{summary.fetched_ML.mean():.1f}", "0 without balancing"),
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
