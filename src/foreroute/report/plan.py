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
    from foreroute.plan.step_plan import StepPlan
    from foreroute.simulate.compare import MethodFigures, StepFacts
    from foreroute.trace import RoutedLayer


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
    return write_html(target, "plan.html.j2", lambda: _values(plan, step, records, facts, layers))


COLUMNS: dict[str, Callable[[MethodFigures], str]] = {
    "Slowest rank over mean": lambda record: over_mean(float(record.imbalance_ML.mean())),
    "In 99 % of cells": lambda record: over_mean(float(np.quantile(record.imbalance_ML, 0.99))),
    "In the worst cell": lambda record: over_mean(float(record.imbalance_ML.max())),
    "Step, modelled": lambda record: step_time(record.seconds),
    "Speedup over static": lambda record: "",  # it needs the others
    "Experts fetched per cell": lambda record: f"{record.fetches_per_cell:.1f}",
    "Homes moved": lambda record: f"{record.home_moves:,}",
    "Served across nodes": lambda record: f"{record.cross_node_share:.0%}",
    "Planning time": lambda record: duration(record.planning_s) if record.name != "static" else "",
}
"""Columns of the table of methods; `MethodFigures` explains them."""


def method_rows(records: Sequence[MethodFigures], step: StepFacts) -> list[TableRow]:
    """One row per record, the last of which is ours, and one for what no plan can beat, with a cell per column."""
    static_s, least_ML = static_of(records).seconds, step.least_over_mean_ML
    rows = []
    for record in records:
        cells = {heading: show(record) for heading, show in COLUMNS.items()}
        cells["Speedup over static"] = times(static_s / record.seconds)
        rows.append(TableRow(label=record.label, cells=cells, ours=record is records[-1]))
    limits = dict.fromkeys(COLUMNS, "") | {
        "Slowest rank over mean": over_mean(float(least_ML.mean())),
        "In 99 % of cells": over_mean(float(np.quantile(least_ML, 0.99))),
        "In the worst cell": over_mean(float(least_ML.max())),
        "Step, modelled": step_time(step.least_seconds),
        "Speedup over static": times(static_s / step.least_seconds),
    }
    return [*rows, TableRow(label="no plan beats", cells=limits)]


def plan_finding(records: Sequence[MethodFigures]) -> str:
    """What the plan is worth beside static and the strongest other balancer, in one sentence."""
    before, after, rival = static_of(records), records[-1], strongest_rival(records)
    worth = f"{as_fast(before.seconds, after.seconds)} static"
    if rival is not None:
        worth += f" and {as_fast(rival.seconds, after.seconds)} the strongest other balancer, {rival.label}"
    loads = [over_mean(float(side.imbalance_ML.mean())) for side in (before, after)]
    return (
        f"By the cost model, the step under this plan is {worth}; the slowest rank has {loads[1]} times the mean load, "
        f"and {loads[0]} times without balancing."
    )


def plan_summary(plan: StepPlan, step: StepFacts, records: Sequence[MethodFigures]) -> list[str]:
    """How the plan gets there, and what the step is like, in sentences."""
    ours = records[-1]
    gap_ML = ours.imbalance_ML / step.least_over_mean_ML - 1
    drift = "" if step.drift_L is None else f", and its own from those of the step before by {_mean(step.drift_L)}"
    return [
        f"A cell has {plan.num_replicas_ML.mean():.1f} replicas, of which {ours.fetches_per_cell:.1f} are fetched "
        f"for it; {ours.home_moves:,} experts change their home.",
        f"In half of the cells the slowest rank's load is within {percentage(float(np.median(gap_ML)))} of the least "
        f"that any plan of these homes and slots can reach, in all within {percentage(float(gap_ML.max()))}. No plan "
        f"makes the step shorter than {step_time(step.least_seconds)}.",
        f"The routes of a micro-step differ from those of the step by {_mean(step.fluctuation_ML)} of the "
        f"assignments{drift}.",
    ]


def _values(
    plan: StepPlan,
    step: StepFacts,
    records: Sequence[MethodFigures],
    facts: Mapping[str, str],
    layers: Sequence[RoutedLayer],
) -> dict[str, Any]:
    from foreroute.report import plan_plots

    sides = (static_of(records), records[-1])
    plots = (
        plan_plots.load_of_cells(sides, layers),
        plan_plots.load_of_ranks(sides, layers),
        plan_plots.time_by_part(sides),
        plan_plots.by_method(records, step.least_seconds, strongest_rival(records)),
    )
    return {
        "facts": facts,
        "finding": plan_finding(records),
        "tiles": _tiles(records),
        "sentences": plan_summary(plan, step, records),
        "plots": plots,
        "columns": list(COLUMNS),
        "rows": method_rows(records, step),
    }


def _tiles(records: Sequence[MethodFigures]) -> list[Tile]:
    before, after = static_of(records), records[-1]
    mean_before, mean_after = (over_mean(float(side.imbalance_ML.mean())) for side in (before, after))
    against = f"{step_time(before.seconds)} without balancing"
    if (rival := strongest_rival(records)) is not None:
        against += f", {step_time(rival.seconds)} with {rival.label}"
    tiles = [
        ("time of the step, modelled", step_time(after.seconds), against),
        ("slowest rank over mean", mean_after, f"{mean_before} without balancing"),
    ]
    if before.cross_node_share or after.cross_node_share:
        without = f"{percentage(before.cross_node_share)} without balancing"
        tiles.append(("served on another node than their token's", percentage(after.cross_node_share), without))
    return [*tiles, ("experts fetched per cell", f"{after.fetches_per_cell:.1f}", "0 without balancing")]


def static_of(records: Sequence[MethodFigures]) -> MethodFigures:
    """What the step is without balancing."""
    return next(record for record in records if record.name == "static")


def strongest_rival(records: Sequence[MethodFigures]) -> MethodFigures | None:
    """The method with the fastest step, but for static and the plan at hand, which is the last record."""
    others = [record for record in records[:-1] if record.name != "static"]
    return min(others, key=lambda record: record.seconds, default=None)


def _mean(share_X: NDArray[np.float64]) -> str:
    known = share_X[np.isfinite(share_X)]
    return percentage(float(known.mean()) if known.size else None)
