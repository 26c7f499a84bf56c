"""A simulated step and what it depends on -> a table for a terminal, sentences, one HTML page. It computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreroute.report.format import TableRow, duration, flattened, over_mean, percentage, step_seconds, step_time
from foreroute.report.template import write_html

if TYPE_CHECKING:  # they load compiled code
    from foreroute.simulate import MethodRecord, SimulateConfig, SimulationRecord, SweepRecord, Timeline
    from foreroute.simulate.fit import FitRecord

AS_FAST = 1.005
"""Methods that take no longer than this times ours are called as fast."""


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


COLUMNS: dict[str, Callable[[MethodRecord], str]] = {
    "Both stages": lambda method: step_seconds(method.training_s),
    "Static / this": lambda method: f"{method.speedup_over_static:.2f}",
    "Of forced balance": lambda method: percentage(method.share_of_forced_balance),
    "Of the bound": lambda method: percentage(method.share_of_bound),
    "Over mean": lambda method: over_mean(method.imbalance),
    "Recompute": lambda method: step_seconds(method.stages.recompute),
    "Update": lambda method: step_seconds(method.stages.update),
    "Plan wait": lambda method: duration(method.stages.planning),
    "Home moves": lambda method: duration(method.stages.home_moves) if method.stages.home_moves else "",
    "Exposed": lambda method: percentage(method.exposed_share),
    "Groups wait": lambda method: percentage(method.groups_waiting),
    "Moved a cell": lambda method: f"{method.fetches_per_cell:.1f}",
    "Planned in": lambda method: duration(method.planning_s),
    "GPU-hours": lambda method: step_seconds(method.gpu_hours),
    "Saved": lambda method: step_seconds(method.gpu_hours_saved),
}
"""Of the table of methods; `MethodRecord` explains them."""
OF_PLANS = ("Plan wait", "Planned in", "Saved")
"""Columns that say nothing of static."""


def simulation_rows(record: SimulationRecord) -> list[TableRow]:
    """One row per method in the order of the record, with the cells of `COLUMNS`; then the two limits."""
    static_s, forced_balance_s, bound_s = record["static"].training_s, record.forced_balance_s, record.bound_s
    rows = [
        TableRow(
            label=method.label,
            cells={
                heading: "" if method.name == "static" and heading in OF_PLANS else show(method)
                for heading, show in COLUMNS.items()
            },
            ours=is_ours(method.name),
        )
        for method in record.methods
    ]
    for label, seconds in (("forced balance", forced_balance_s), ("no plan beats", bound_s)):
        cells = {
            "Both stages": step_seconds(seconds),
            "Static / this": f"{static_s / seconds:.2f}",
            "Of forced balance": percentage(forced_balance_s / seconds),
            "Of the bound": percentage(bound_s / seconds),
        }
        rows.append(TableRow(label=label, cells=cells))
    return rows


def simulation_summary(record: SimulationRecord) -> list[str]:
    """What the methods are worth on this step, in sentences."""
    static, main = record["static"], headline(record)
    limits = (
        f"Forced balance would take {step_time(record.forced_balance_s)}; no plan takes less than "
        f"{step_time(record.bound_s)}."
    )
    if main.name == "static":
        return [
            f"Recompute and update take {step_time(static.training_s)} without balancing, and no other method "
            f"was simulated. {limits}"
        ]
    return [
        f"Recompute and update take {step_time(static.training_s)} without balancing and "
        f"{step_time(main.training_s)} with {main.label}, {_times(static, main)}. {limits}",
        f"The slowest rank of a cell has {over_mean(static.imbalance)} times the mean load without balancing and "
        f"{over_mean(main.imbalance)} times with {main.label}.",
        *_rivals(record, main),
        f"Planning takes {duration(main.planning_s)} with {main.label}, and the recompute waits "
        f"{duration(main.stages.planning)} for it.",
    ]


def headline(record: SimulationRecord) -> MethodRecord:
    """The method that the page is about: the first of ours, else the fastest."""
    ours = [method for method in record.methods if is_ours(method.name)]
    return ours[0] if ours else _fastest(record.methods)


def compared_methods(record: SimulationRecord) -> list[MethodRecord]:
    """The few methods that plots compare with static: the headline, the fastest of ours, the fastest of the others."""
    balanced = [method for method in record.methods if method.name != "static"]
    ours = [method for method in balanced if is_ours(method.name)]
    others = [method for method in balanced if not is_ours(method.name)]
    chosen = [*ours[:1], *(_fastest(group) for group in (ours, others) if group)]
    return [method for n, method in enumerate(chosen) if method not in chosen[:n]]


def strongest_rival(record: SimulationRecord) -> MethodRecord | None:
    """The fastest of the methods that are neither static nor plans of ours; None where that is the headline itself."""
    others = [method for method in record.methods if method.name != "static" and not is_ours(method.name)]
    fastest = _fastest(others) if others else None
    return None if fastest is headline(record) else fastest


def is_ours(name: str) -> bool:
    """Whether the method of this short name is a plan of ours."""
    from foreroute.planner.methods import OURS

    return name in OURS


def fit_rows(found: FitRecord, before: Mapping[str, float]) -> list[TableRow]:
    """One row per fitted parameter, with units.

    Args:
        found: what was fitted.
        before: the configured values by name.
    """
    return [
        TableRow(label=name, cells={"Configured": _value(name, before[name]), "Fitted": _value(name, value)})
        for name, value in found.parameters.items()
    ]


def fit_summary(found: FitRecord) -> str:
    """How near the predictions are, in a sentence."""
    correlation = "not defined" if found.rank_correlation is None else f"{found.rank_correlation:.2f}"
    return (
        f"{len(found.names)} measured stages are predicted with a median error of {percentage(found.median_error)} and "
        f"a worst of {percentage(found.worst_error)}; the rank correlation is {correlation}. The rates "
        "were fitted to these very measurements."
    )


def _values(
    record: SimulationRecord,
    config: SimulateConfig,
    sweeps: Sequence[SweepRecord],
    timelines: Sequence[Timeline],
    fit: tuple[FitRecord, Mapping[str, float]] | None,
) -> dict[str, Any]:
    from foreroute.report import simulation_plots, sweep_plots

    return {
        "gpus": f"{record.gpus:,}",
        "tiles": _tiles(record),
        "sentences": simulation_summary(record),
        "facts": record.facts | {"step": _step(record)},
        "stages": (simulation_plots.by_stage(record), simulation_plots.by_part(record)),
        "timelines": simulation_plots.timelines(timelines),
        "imbalance": sweep_plots.against_imbalance(record, sweeps),
        "sensitivity_keys": sweep_plots.legend(record),
        "sensitivities": sweep_plots.sensitivities(record, config, sweeps),
        "columns": list(COLUMNS),
        "rows": simulation_rows(record),
        "fit": None if fit is None else (fit_summary(fit[0]), fit_rows(*fit), simulation_plots.predictions(fit[0])),
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


def _rivals(record: SimulationRecord, main: MethodRecord) -> list[str]:
    """What else is as fast, or the fastest."""
    sentences = []
    for method in compared_methods(record)[1:]:
        ratio = method.training_s / main.training_s
        words = (
            f"takes {step_time(method.training_s)}, {1 / ratio:.2f} times as fast as {main.label}"
            if ratio < 1 / AS_FAST
            else f"is as fast as {main.label}, with {step_time(method.training_s)}"
            if ratio <= AS_FAST
            else f"takes {step_time(method.training_s)}, {ratio:.2f} times as long as {main.label}"
        )
        which = "The fastest plan of ours" if is_ours(method.name) else "The fastest of the other methods"
        sentences.append(
            f"{which} ({method.label}) {words}; it moves {method.fetches_per_cell:.1f} experts for a cell, "
            f"{main.label} {main.fetches_per_cell:.1f}. The whole step, with what planning and home moves delay it by, "
            f"takes {step_time(method.step_s)}, with {main.label} {step_time(main.step_s)}."
        )
    return sentences


def _times(static: MethodRecord, method: MethodRecord) -> str:
    return f"{static.training_s / method.training_s:.2f} times as fast"


def _fastest(methods: tuple[MethodRecord, ...] | list[MethodRecord]) -> MethodRecord:
    return min(methods, key=lambda method: method.training_s)


def _value(name: str, value: float) -> str:
    if name.endswith("_flops_per_s"):
        return f"{value / 1e12:,.4g} TFLOP/s"
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:,.4g} GB/s"
    return duration(value)
