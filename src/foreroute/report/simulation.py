"""A simulated step and what it depends on -> a table for a terminal, sentences, one HTML page. It computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreroute.report.format import (
    AS_FAST,
    TableRow,
    Tile,
    as_fast,
    duration,
    flattened,
    over_mean,
    percentage,
    step_time,
    times,
)
from foreroute.report.template import write_html

if TYPE_CHECKING:  # they load compiled code
    from foreroute.simulate import MethodRecord, SimulateConfig, SimulationRecord, SweepRecord, Timeline
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


COLUMNS: dict[str, Callable[[MethodRecord], str]] = {
    "Executed": lambda method: "no" if method.not_executed else "yes",
    "Recompute and update": lambda method: step_time(method.training_s),
    "Speedup over static": lambda method: times(method.speedup_over_static),
    "Of forced balance": lambda method: percentage(method.share_of_forced_balance),
    "Of the bound": lambda method: percentage(method.share_of_bound),
    "Slowest rank over mean": lambda method: over_mean(method.imbalance),
    "Recompute": lambda method: step_time(method.stages.recompute),
    "Update": lambda method: step_time(method.stages.update),
    "Wait for the plan": lambda method: duration(method.stages.planning),
    "Home moves": lambda method: duration(method.stages.home_moves) if method.stages.home_moves else "",
    "Exposed transfers": lambda method: percentage(method.exposed_share),
    "Groups wait": lambda method: percentage(method.groups_waiting),
    "Experts fetched per cell": lambda method: f"{method.fetches_per_cell:.1f}",
    "Planning time": lambda method: duration(method.planning_s),
    "GPU-hours saved": lambda method: _saved(method),
}
"""Columns of the table of methods; `MethodRecord` explains them."""
OF_PLANS = ("Wait for the plan", "Planning time", "GPU-hours saved")
"""Columns that say nothing of static."""


def simulation_rows(record: SimulationRecord) -> list[TableRow]:
    """One row per method in the order of the record; then the two limits. All have the cells of `COLUMNS`."""
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
        cells = dict.fromkeys(COLUMNS, "") | {
            "Executed": "no",
            "Recompute and update": step_time(seconds),
            "Speedup over static": times(static_s / seconds),
            "Of forced balance": percentage(forced_balance_s / seconds),
            "Of the bound": percentage(bound_s / seconds),
        }
        rows.append(TableRow(label=label, cells=cells))
    return rows


def simulation_finding(record: SimulationRecord) -> str:
    """What the methods are worth beside static and the strongest of the others, in one sentence."""
    static, main, rival = record["static"], headline(record), strongest_rival(record)
    by = "By the cost model" + (", and not executed" if static.not_executed else "")
    if main.name == "static":
        return (
            f"{by}, forced balance would make recompute and update "
            f"{as_fast(static.training_s, record.forced_balance_s)} static; no other method was simulated."
        )
    worth = f"{as_fast(static.training_s, main.training_s)} static"
    best = _fastest([method for method in record.methods if is_ours(method.name)] or [main])
    if rival is not None:
        worth += f" and {as_fast(rival.training_s, main.training_s)} {named(rival, record)}, the strongest other method"
    if main.training_s > AS_FAST * best.training_s:
        against = rival or main
        worth += f"; {named(best, record)} is {as_fast(against.training_s, best.training_s)} {against.label}"
    return f"{by}, {named(main, record)} makes recompute and update {worth}."


def simulation_summary(record: SimulationRecord) -> list[str]:
    """What stands behind the finding, in sentences."""
    static, main = record["static"], headline(record)
    limits = (
        f"Forced balance would take {step_time(record.forced_balance_s)}; no plan takes less than "
        f"{step_time(record.bound_s)}."
    )
    if main.name == "static":
        return [
            f"Recompute and update take {step_time(static.training_s)} without balancing. {limits}",
            _executed(record),
        ]
    moves = [
        f"{named(method, record)} fetches {method.fetches_per_cell:.1f} experts for a cell, and its whole step takes "
        f"{step_time(method.step_s)}, planning and home moves included."
        for method in compared_methods(record)
    ]
    return [
        f"Recompute and update take {step_time(static.training_s)} without balancing and "
        f"{step_time(main.training_s)} with {named(main, record)}. {limits}",
        " ".join(moves),
        f"Planning takes {duration(main.planning_s)} with {named(main, record)}, and the recompute waits "
        f"{duration(main.stages.planning)} for it.",
        _executed(record),
    ]


def named(method: MethodRecord | Timeline, record: SimulationRecord) -> str:
    """The label, marked where no executor carries the method out. Where none carries out static, `modelled` says so."""
    is_marked = method.not_executed and not record["static"].not_executed
    return f"{method.label} (not executed)" if is_marked else method.label


def modelled(record: SimulationRecord) -> str:
    """What all seconds are, for axes."""
    return "modelled, not executed" if record["static"].not_executed else "modelled"


def _executed(record: SimulationRecord) -> str:
    """Which methods no executor carries out, and why."""
    if missing := record["static"].not_executed:
        return f"No executor carries out any of it: it takes {', '.join(missing)}."
    reasons: dict[tuple[str, ...], list[str]] = {}
    for method in record.methods:
        reasons.setdefault(method.not_executed, []).append(method.label)
    executed = "; ".join(reasons.pop(()))
    rest = [f"{'; '.join(labels)} would take {', '.join(missing)}" for missing, labels in reasons.items()]
    return f"Executed in tests on CPU processes: {executed}. Not executed: {'. '.join([*rest, 'Nor are the limits'])}."


def headline(record: SimulationRecord) -> MethodRecord:
    """The method that the page is about: the first of ours, else the fastest of the others, else static."""
    balanced = [method for method in record.methods if method.name != "static"]
    ours = [method for method in balanced if is_ours(method.name)]
    return ours[0] if ours else _fastest(balanced or record.methods)


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
    from foreroute.simulate.methods import PRESETS

    return name in PRESETS


def fit_rows(found: FitRecord, before: Mapping[str, float]) -> list[TableRow]:
    """One row per fitted parameter, with units; `before` has the configured values by name."""
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
        "finding": simulation_finding(record),
        "tiles": _tiles(record),
        "sentences": simulation_summary(record),
        "facts": record.facts | {"step": _step(record)},
        "plots": [
            *simulation_plots.timelines(timelines, record),
            simulation_plots.by_stage(record),
            simulation_plots.by_part(record),
        ],
        "sensitivity_keys": sweep_plots.legend(record),
        "sensitivities": sweep_plots.sensitivities(record, config, sweeps),
        "columns": list(COLUMNS),
        "rows": simulation_rows(record),
        "fit": None if fit is None else (fit_summary(fit[0]), fit_rows(*fit)),
        "modelled": modelled(record),
        "early": config.execution.early_cells,
        "rollout": step_time(record.rollout_s) if record.rollout_s else "",
        "planning": "configured" if config.execution.planning_s is not None else "measured",
        "config": flattened(config.model_dump()),
    }


def _tiles(record: SimulationRecord) -> list[Tile]:
    static, main, rival = record["static"], headline(record), strongest_rival(record)
    seconds = f"{step_time(main.training_s)} instead of {step_time(static.training_s)} without balancing"
    if main.not_executed:
        seconds += ", not executed"
    tiles = [("speedup over static, of recompute and update", times(main.speedup_over_static), seconds)]
    if rival is not None:
        seconds = f"{step_time(rival.training_s)} with {named(rival, record)}"
        tiles.append(("speedup over the strongest other method", times(rival.training_s / main.training_s), seconds))
    hours = f"{1000 * main.gpu_hours_saved:,.3g} of {1000 * static.gpu_hours:,.3g} in 1000 steps"
    forced, rank = percentage(static.share_of_forced_balance), over_mean(static.imbalance)
    return [
        *tiles,
        ("speed relative to forced balance", percentage(main.share_of_forced_balance), f"{forced} without balancing"),
        ("GPU-hours saved", _saved(main), hours),
        ("slowest rank over mean", over_mean(main.imbalance), f"{rank} without balancing"),
    ]


def _saved(method: MethodRecord) -> str:
    """Share of the GPU-hours of static."""
    return percentage(method.gpu_hours_saved / (method.gpu_hours + method.gpu_hours_saved))


def _step(record: SimulationRecord) -> str:
    return (
        f"about {record.tokens_per_rank:,.0f} tokens per GPU and micro-step, {record.cells_per_group:,} cells per "
        f"group, {record.groups_simulated} of {record.groups} groups simulated"
    )


def _fastest(methods: tuple[MethodRecord, ...] | list[MethodRecord]) -> MethodRecord:
    return min(methods, key=lambda method: method.training_s)


def _value(name: str, value: float) -> str:
    if name.endswith("_flops_per_s"):
        return f"{value / 1e12:,.4g} TFLOP/s"
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:,.4g} GB/s"
    return duration(value)
