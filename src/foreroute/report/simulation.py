"""A simulated step and what it depends on -> one self-contained HTML page. It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreroute.report.fit_rows import fit_rows, fit_summary
from foreroute.report.plan_rows import over_mean, step_seconds, step_time
from foreroute.report.simulation_rows import headline, simulation_rows, simulation_summary, strongest_rival
from foreroute.report.template import write_html
from foreroute.report.wording import flattened, percentage

if TYPE_CHECKING:
    from foreroute.simulate import SimulateConfig, SimulationRecord, SweepRecord, Timeline
    from foreroute.simulate.fit import FitRecord


def write_simulation_page(
    record: SimulationRecord,
    config: SimulateConfig,
    target: Path,
    *,
    sweeps: Sequence[SweepRecord] = (),
    timelines: Sequence[Timeline] = (),
    fit: tuple[FitRecord, Mapping[str, float]] | None = None,
) -> Path:
    """Write the page; one that is there is replaced.

    Args:
        record: all methods on one step.
        config: that was simulated.
        target: the file to write.
        sweeps: of the same configuration.
        timelines: of the same micro-step and layers.
        fit: what was fitted to measurements, if anything was, and the values before.

    Raises:
        InputError: when `target` cannot be written or is no page of ours, or the `report` extra is not installed.
    """
    return write_html(target, "simulation.html.j2", lambda: _values(record, config, sweeps, timelines, fit))


def _values(
    record: SimulationRecord,
    config: SimulateConfig,
    sweeps: Sequence[SweepRecord],
    timelines: Sequence[Timeline],
    fit: tuple[FitRecord, Mapping[str, float]] | None,
) -> dict[str, Any]:
    from foreroute.report import fit_plot, simulation_plots, sweep_plots, timeline_plots

    return {
        "gpus": f"{record.gpus:,}",
        "tiles": _tiles(record),
        "sentences": simulation_summary(record),
        "facts": record.facts | {"step": _step(record)},
        "stages": (simulation_plots.by_stage(record), simulation_plots.by_part(record)),
        "timelines": timeline_plots.timelines(timelines),
        "imbalance": sweep_plots.against_imbalance(record, sweeps),
        "sensitivity_keys": sweep_plots.keys(record),
        "sensitivities": sweep_plots.sensitivities(record, config, sweeps),
        "rows": simulation_rows(record),
        "fit": None if fit is None else (fit_summary(fit[0]), fit_rows(*fit), fit_plot.predictions(fit[0])),
        "publish": step_seconds(record.publish_s),
        "rollout": step_seconds(record.rollout_s) if record.rollout_s else "",
        "planning": "configured" if config.execution.planning_s is not None else "measured",
        "config": flattened(config.model_dump()),
    }


def _tiles(record: SimulationRecord) -> list[tuple[str, str, str]]:
    """Name, value of the headline's method, and what it is to be seen against."""
    static, main = record["static"], headline(record)
    seconds = f"{step_time(main.training_s)} instead of {step_time(static.training_s)} without balancing"
    if (rival := strongest_rival(record)) is not None:
        seconds += f"; {rival.speedup_over_static:.2f}\N{MULTIPLICATION SIGN} with {rival.label}"
    return [
        (
            "speedup of recompute and update",
            f"{main.speedup_over_static:.2f}\N{MULTIPLICATION SIGN}",
            seconds,
        ),
        (
            "speed relative to forced balance",
            percentage(main.share_of_forced_balance),
            f"{percentage(static.share_of_forced_balance)} without balancing",
        ),
        (
            "GPU-hours saved per step",
            step_seconds(main.gpu_hours_saved),
            f"of {step_seconds(static.gpu_hours)} without balancing",
        ),
        (
            "slowest rank over mean",
            over_mean(main.imbalance),
            f"{over_mean(static.imbalance)} without balancing",
        ),
    ]


def _step(record: SimulationRecord) -> str:
    return (
        f"about {record.tokens_per_rank:,.0f} tokens per GPU and micro-step, {record.cells_per_group:,} cells per "
        f"group, {record.groups_simulated} of {record.groups} groups simulated"
    )
