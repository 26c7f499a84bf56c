"""A plan, what it was made for and what else was tried -> one self-contained HTML page. It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreroute.report.plan_rows import method_rows, over_mean, plan_summary, step_time, strongest_rival
from foreroute.report.template import write_html
from foreroute.report.wording import percentage

if TYPE_CHECKING:
    from foreroute.costs.figures import StepSummary
    from foreroute.plan.step_plan import StepPlan
    from foreroute.planner.compare import BalancerRecord
    from foreroute.trace import RoutedLayer


def write_plan_page(
    plan: StepPlan,
    survey: StepSummary,
    records: Sequence[BalancerRecord],
    facts: Mapping[str, str],
    target: Path,
    *,
    layers: Sequence[RoutedLayer] = (),
) -> Path:
    """Write the page; one that is there is replaced.

    Args:
        plan: the plan.
        survey: of its step.
        records: of the methods to compare, the plan's own last.
        facts: what was planned and how, by name.
        target: the file to write.
        layers: L, where the model's own numbers of them are known.

    Raises:
        InputError: when `target` cannot be written or is no page of ours, or the `report` extra is not installed.
    """
    return write_html(target, "plan.html.j2", lambda: _values(plan, survey, records, facts, layers))


def _values(
    plan: StepPlan,
    survey: StepSummary,
    records: Sequence[BalancerRecord],
    facts: Mapping[str, str],
    layers: Sequence[RoutedLayer],
) -> dict[str, Any]:
    from foreroute.report import plan_heat, plan_plots

    sections = (
        ("What the step is like", (plan_plots.stability(survey, layers), plan_plots.by_layer(survey, layers))),
        ("Loads before and after", (plan_heat.ranks(survey, layers), plan_heat.cells(survey, layers))),
        (
            "What the plan does",
            (
                plan_plots.gap_to_bound(survey),
                plan_plots.replicas(plan, survey),
                plan_plots.crossing(survey),
                plan_plots.parts(survey),
            ),
        ),
    )
    return {
        "facts": facts,
        "tiles": _tiles(survey, records),
        "sentences": plan_summary(plan, survey),
        "sections": sections,
        "rows": method_rows(records, survey),
        "methods": plan_plots.by_method(records, survey),
    }


def _tiles(survey: StepSummary, records: Sequence[BalancerRecord]) -> list[tuple[str, str, str]]:
    """Name, value under the plan, and what it is to be seen against."""
    before, after = survey.before, survey.after
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
        ("experts fetched per cell", f"{survey.fetched_ML.mean():.1f}", "0 without balancing"),
    ]
