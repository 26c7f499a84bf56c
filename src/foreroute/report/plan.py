"""A plan, what it was made for and what else was tried -> a table, tiles, one page. It computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foreroute.report.format import TIMES, as_fast, duration, over_mean, percentage, step_time, times
from foreroute.report.page import Column, Page, PageSection, Table, TableRow, Tile, texts, write_page

if TYPE_CHECKING:  # they load compiled code
    from foreroute.plan.step_plan import StepPlan
    from foreroute.simulate.compare import MethodFigures, StepFacts
    from foreroute.trace import RoutedLayer

COLUMNS: dict[Column, Callable[[MethodFigures, float], str]] = {
    Column("Method", " "): lambda record, _: record.label,
    Column("Slowest rank over mean", f"slowest\nrank,\n{TIMES} mean"): lambda record, _: over_mean(
        float(record.imbalance_ML.mean())
    ),
    Column("In 99 % of cells"): lambda record, _: over_mean(float(np.quantile(record.imbalance_ML, 0.99))),
    Column("In the worst cell", "in the\nworst\ncell"): lambda record, _: over_mean(float(record.imbalance_ML.max())),
    Column("Step, modelled", "step"): lambda record, _: step_time(record.seconds),
    Column("Speedup over static", "speedup\nover\nstatic"): lambda record, static_s: times(static_s / record.seconds),
    Column("Experts fetched per cell", "experts\nfetched\na cell"): lambda record, _: f"{record.fetches_per_cell:.1f}",
    Column("Homes moved"): lambda record, _: f"{record.home_moves:,}",
    Column("Served across nodes", "served\nacross\nnodes"): lambda record, _: f"{record.cross_node_share:.0%}",
    Column("Planning time", "to plan"): lambda record, _: (
        duration(record.planning_s) if record.name != "static" else ""
    ),
}
"""Each with what it shows of a record and of the seconds of static; `MethodFigures` explains them."""


def write_plan_page(
    plan: StepPlan,
    step: StepFacts,
    records: Sequence[MethodFigures],
    facts: Mapping[str, str],
    target: Path,
    *,
    layers: Sequence[RoutedLayer] = (),
) -> Path:
    """Write the page; one that is there is replaced.

    Args:
        plan: the plan.
        step: that it was made for.
        records: of the methods to compare, the plan's own last.
        facts: what was planned and how, by name.
        target: the file to write.
        layers: L, where the model's own numbers of them are known.

    Raises:
        InputError: when `target` cannot be written or is no page of ours, or the `report` extra is not installed.
    """
    return write_page(target, lambda: _page(plan, step, records, facts, layers))


def plan_table(records: Sequence[MethodFigures], step: StepFacts) -> Table:
    """One row per record, the last of which is ours, and one for what no plan can beat."""
    static_s, least_ML = static_of(records).seconds, step.least_over_mean_ML
    rows = [
        TableRow(cells=tuple(show(record, static_s) for show in COLUMNS.values()), strong=record is records[-1])
        for record in records
    ]
    limits = {
        "Method": "no plan beats",
        "Slowest rank over mean": over_mean(float(least_ML.mean())),
        "In 99 % of cells": over_mean(float(np.quantile(least_ML, 0.99))),
        "In the worst cell": over_mean(float(least_ML.max())),
        "Step, modelled": step_time(step.least_seconds),
        "Speedup over static": times(static_s / step.least_seconds),
    }
    rows.append(TableRow(cells=tuple(limits.get(column.heading, "") for column in COLUMNS)))
    return Table(title="The step by method, modelled", columns=tuple(COLUMNS), rows=tuple(rows))


def plan_finding(records: Sequence[MethodFigures]) -> str:
    """What the plan is worth beside static and the strongest other balancer, in one sentence."""
    before, after, baseline = static_of(records), records[-1], strongest_baseline(records)
    worth = f"{as_fast(before.seconds, after.seconds)} static"
    if baseline is not None:
        worth += f" and {as_fast(baseline.seconds, after.seconds)} the strongest other balancer, {baseline.label}"
    loads = [over_mean(float(side.imbalance_ML.mean())) for side in (before, after)]
    return (
        f"By the cost model, the step under this plan is {worth}; the slowest rank has {loads[1]} times the mean load, "
        f"and {loads[0]} times without balancing."
    )


def plan_tiles(plan: StepPlan, step: StepFacts, records: Sequence[MethodFigures]) -> tuple[Tile, ...]:
    """How the plan gets there."""
    gap_ML = records[-1].imbalance_ML / step.least_over_mean_ML - 1
    return (
        Tile("replicas in a cell", f"{plan.num_replicas_ML.mean():.1f}"),
        Tile(
            "slowest rank above the least possible, median",
            percentage(float(np.median(gap_ML))),
            f"{percentage(float(gap_ML.max()))} at most, with these homes and slots",
        ),
    )


def static_of(records: Sequence[MethodFigures]) -> MethodFigures:
    """What the step is without balancing."""
    return next(record for record in records if record.name == "static")


def strongest_baseline(records: Sequence[MethodFigures]) -> MethodFigures | None:
    """The method with the fastest step, but for static and the plan at hand, which is the last record."""
    others = [record for record in records[:-1] if record.name != "static"]
    return min(others, key=lambda record: record.seconds, default=None)


def _page(
    plan: StepPlan,
    step: StepFacts,
    records: Sequence[MethodFigures],
    facts: Mapping[str, str],
    layers: Sequence[RoutedLayer],
) -> Page:
    from foreroute.report import plan_plots

    sides = (static_of(records), records[-1])
    plots = (
        plan_plots.load_of_cells(sides, layers),
        plan_plots.load_of_ranks(sides, layers),
        plan_plots.time_by_part(sides),
    )
    return Page(
        command="foreroute plan",
        title="Plan of a step",
        finding=plan_finding(records),
        tiles=plan_tiles(plan, step, records),
        facts=facts,
        sections=(
            PageSection(heading="Before and after", plots=plots),
            PageSection(heading="Against other balancers", tables=(plan_table(records, step),), notes=texts("plan")),
        ),
    )
