"""A plan, what it was made for and what else was tried -> one self-contained HTML page. It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foreroute.errors import InputError
from foreroute.report.plan_rows import method_rows, over_mean, plan_summary, step_seconds
from foreroute.report.wording import percentage
from foreroute.trace import write_atomically

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
        InputError: when `target` is a folder, or the `report` extra is not installed.
    """
    target = Path(target)
    if target.is_dir():
        raise InputError(f"{target} is a folder; name the file to write, for example {target / 'plan.html'}")
    html = _render(plan, survey, records, facts)
    write_atomically(target, lambda temporary: _write(temporary, html))
    return target


def _write(path: str, html: str) -> None:
    Path(path).write_text(html, encoding="utf-8")


def _render(plan: StepPlan, survey: Survey, records: Sequence[Record], facts: Mapping[str, str]) -> str:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined

        from foreroute.report import plan_heat, plan_plots
    except ModuleNotFoundError as error:
        raise InputError(f"a report needs {error.name}; install it with: pip install 'foreroute[report]'") from error
    environment = Environment(
        loader=PackageLoader("foreroute.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
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
    return environment.get_template("plan.html.j2").render(
        facts=facts,
        tiles=_tiles(survey),
        sentences=plan_summary(plan, survey),
        sections=sections,
        rows=method_rows(records, survey),
        methods=plan_plots.by_method(records, survey),
    )


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
