"""A plan, what it was made for and what else was tried -> one self-contained HTML page. It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreroute.report.plan_rows import method_rows, over_mean, plan_summary, step_seconds
from foreroute.report.template import write_html
from foreroute.report.wording import percentage

if TYPE_CHECKING:
    from foreroute.balance.compare import Record
    from foreroute.balance.step_plan import StepPlan
    from foreroute.balance.survey import Survey


def write_plan_page(
    plan: StepPlan, survey: Survey, records: Sequence[Record], facts: Mapping[str, str], target: Path
) -> Path:
    """Write the page; one that is there is replaced.

    Args:
        plan: the plan.
        survey: of its step.
        records: of the methods to compare, the plan's own last.
        facts: what was planned and how, by name.
        target: the file to write.

    Raises:
        InputError: when `target` cannot be written or is no page of ours, or the `report` extra is not installed.
    """
    return write_html(target, "plan.html.j2", lambda: _values(plan, survey, records, facts))


def _values(plan: StepPlan, survey: Survey, records: Sequence[Record], facts: Mapping[str, str]) -> dict[str, Any]:
    from foreroute.report import plan_heat, plan_plots

    sections = (
        ("What the step is like", (plan_plots.stability(survey), plan_plots.by_layer(survey))),
        ("Loads before and after", (plan_heat.ranks(survey), plan_heat.cells(survey))),
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
        "tiles": _tiles(survey),
        "sentences": plan_summary(plan, survey),
        "sections": sections,
        "rows": method_rows(records, survey),
        "methods": plan_plots.by_method(records, survey),
    }


def _tiles(survey: Survey) -> list[tuple[str, str, str]]:
    """Name, value under the plan, and value without balancing."""
    before, after = survey.before, survey.after
    mean_before, mean_after = (over_mean(float(side.imbalance_ML.mean())) for side in (before, after))
    return [
        ("slowest rank over mean", mean_after, mean_before),
        ("time of the step, modelled", f"{step_seconds(after.seconds)} s", f"{step_seconds(before.seconds)} s"),
        ("assignments that cross nodes", percentage(after.crossing), percentage(before.crossing)),
        ("experts fetched per cell", f"{survey.fetched_ML.mean():.1f}", "0"),
    ]
