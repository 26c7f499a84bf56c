"""A plan, what it was made for and what else was tried -> a table for a terminal, sentences, one HTML page.

It computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from foreroute.report.format import TableRow, Tile, as_fast, duration, over_mean, percentage, step_time, times
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


COLUMNS: dict[str, Callable[[BalancerRecord], str]] = {
    "Slowest rank over mean": lambda record: over_mean(record.imbalance_mean),
    "In 99 % of cells": lambda record: over_mean(record.imbalance_p99),
    "In the worst cell": lambda record: over_mean(record.imbalance_worst),
    "Step, modelled": lambda record: step_time(record.seconds),
    "Speedup over static": lambda record: "",  # it needs the others
    "Experts fetched per cell": lambda record: f"{record.fetches_per_cell:.1f}",
    "Homes moved": lambda record: f"{record.home_moves:,}",
    "Served across nodes": lambda record: f"{record.cross_node_share:.0%}",
    "Planning time": lambda record: duration(record.planning_s) if record.name not in UNBALANCED else "",
}
"""Of the table of methods; `BalancerRecord` explains them."""


def method_rows(records: Sequence[BalancerRecord], summary: StepSummary) -> list[TableRow]:
    """One row per record, the last of which is ours, and one for what no plan can beat, with a cell per column."""
    static_s, bound = summary.before.seconds, summary.bound_ML
    rows = []
    for record in records:
        cells = {heading: show(record) for heading, show in COLUMNS.items()}
        cells["Speedup over static"] = times(static_s / record.seconds)
        rows.append(TableRow(label=record.label, cells=cells, ours=record is records[-1]))
    limits = dict.fromkeys(COLUMNS, "") | {
        "Slowest rank over mean": over_mean(float(bound.mean())),
        "In 99 % of cells": over_mean(float(np.quantile(bound, 0.99))),
        "In the worst cell": over_mean(float(bound.max())),
        "Step, modelled": step_time(summary.least_seconds),
        "Speedup over static": times(static_s / summary.least_seconds),
    }
    return [*rows, TableRow(label="no plan beats", cells=limits)]


def plan_finding(summary: StepSummary, records: Sequence[BalancerRecord]) -> str:
    """What the plan is worth beside static and the strongest other balancer, in one sentence."""
    before, after, rival = summary.before, summary.after, strongest_rival(records)
    worth = f"{as_fast(before.seconds, after.seconds)} static"
    if rival is not None:
        worth += f" and {as_fast(rival.seconds, after.seconds)} the strongest other balancer, {rival.label}"
    loads = [over_mean(float(side.imbalance_ML.mean())) for side in (before, after)]
    return (
        f"By the cost model, the step under this plan is {worth}; the slowest rank has {loads[1]} times the mean load, "
        f"and {loads[0]} times without balancing."
    )


def plan_summary(plan: StepPlan, summary: StepSummary) -> list[str]:
    """How the plan gets there, and what the step is like, in sentences."""
    cells = summary.fetched_ML.size
    gap_ML = summary.after.imbalance_ML / summary.bound_ML - 1
    drift = (
        f", and its own from those of the step before by {_mean(summary.drift_L)}"
        if summary.drift_L is not None
        else ""
    )
    return [
        f"A cell has {len(plan.expert_R) / cells:.1f} replicas, of which {summary.fetched_ML.mean():.1f} are fetched "
        f"for it; {len(plan.home_moves):,} experts change their home.",
        f"In half of the cells the slowest rank's load is within {percentage(float(np.median(gap_ML)))} of the least "
        f"that any plan of these homes and slots can reach, in all within {percentage(float(gap_ML.max()))}. No plan "
        f"makes the step shorter than {step_time(summary.least_seconds)}.",
        f"The routes of a micro-step differ from those of the step by {_mean(summary.fluctuation_ML)} of the "
        f"assignments{drift}.",
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
    plots = (
        plan_plots.load_of_cells(summary, layers),
        plan_plots.load_of_ranks(summary, layers),
        plan_plots.time_by_part(summary),
        plan_plots.by_method(records, summary, strongest_rival(records)),
    )
    return {
        "facts": facts,
        "finding": plan_finding(summary, records),
        "tiles": _tiles(summary, records),
        "sentences": plan_summary(plan, summary),
        "plots": plots,
        "columns": list(COLUMNS),
        "rows": rows,
    }


def _tiles(summary: StepSummary, records: Sequence[BalancerRecord]) -> list[Tile]:
    before, after = summary.before, summary.after
    mean_before, mean_after = (over_mean(float(side.imbalance_ML.mean())) for side in (before, after))
    against = f"{step_time(before.seconds)} without balancing"
    if (rival := strongest_rival(records)) is not None:
        against += f", {step_time(rival.seconds)} with {rival.label}"
    tiles = [
        ("time of the step, modelled", step_time(after.seconds), against),
        ("slowest rank over mean", mean_after, f"{mean_before} without balancing"),
    ]
    if before.crossing or after.crossing:
        without = f"{percentage(before.crossing)} without balancing"
        tiles.append(("served on another node than their token's", percentage(after.crossing), without))
    return [*tiles, ("experts fetched per cell", f"{summary.fetched_ML.mean():.1f}", "0 without balancing")]


def strongest_rival(records: Sequence[BalancerRecord]) -> BalancerRecord | None:
    """Of all methods but static and the plan at hand, which is the last record, the one with the fastest step."""
    others = [record for record in records[:-1] if record.name not in UNBALANCED]
    return min(others, key=lambda record: record.seconds, default=None)


def _mean(share_X: NDArray[np.float64]) -> str:
    known = share_X[np.isfinite(share_X)]
    return percentage(float(known.mean()) if known.size else None)
