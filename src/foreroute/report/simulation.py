"""A simulated step and what it depends on -> tables, sentences, one page. It computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from foreroute.report.format import AS_FAST, as_fast, duration, flattened, over_mean, percentage, step_time, times
from foreroute.report.page import Column, Page, PageSection, Table, TableRow, Tile, texts, write_page

if TYPE_CHECKING:  # they load compiled code
    from foreroute.simulate import MethodRecord, SimulateConfig, SimulationRecord, SweepRecord, Timeline
    from foreroute.simulate.fit import FitRecord

COLUMNS: dict[Column, Callable[[MethodRecord], str]] = {
    Column("Method", " "): lambda method: method.label,
    Column("Executed", "exe-\ncuted"): lambda method: "no" if method.not_executed else "yes",
    Column("Recompute and update", "recompute\nand\nupdate"): lambda method: step_time(method.training_s),
    Column("Speedup over static", "speedup\nover\nstatic"): lambda method: times(method.speedup_over_static),
    Column("Share of forced balance", "of\nforced\nbalance"): lambda method: percentage(method.share_of_forced_balance),
    Column("Share of the bound"): lambda method: percentage(method.share_of_bound),
    Column("Slowest rank over mean", "slowest\nrank,\nof mean"): lambda method: over_mean(method.imbalance),
    Column("Wait for the plan"): lambda method: _planned(method, duration(method.stages.planning)),
    Column("Home moves"): lambda method: duration(method.stages.home_moves) if method.stages.home_moves else "",
    Column("Exposed transfers"): lambda method: percentage(method.exposed_share),
    Column("Groups wait"): lambda method: percentage(method.groups_waiting),
    Column("Experts fetched per cell"): lambda method: f"{method.fetches_per_cell:.1f}",
    Column("Planning time", "planning\ntime"): lambda method: _planned(method, duration(method.planning_s)),
    Column("GPU-hours saved", "GPU-hours\nsaved"): lambda method: _planned(
        method, percentage(method.gpu_hours_saved / (method.gpu_hours + method.gpu_hours_saved))
    ),
}
"""Each with what it shows; `MethodRecord` explains them."""


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
    return write_page(target, lambda: _page(record, config, sweeps, timelines, fit))


def simulation_table(record: SimulationRecord) -> Table:
    """One row per method in the order of the record; then the two limits."""
    rows = [
        TableRow(cells=tuple(show(method) for show in COLUMNS.values()), strong=is_ours(method.name))
        for method in record.methods
    ]
    for label, seconds in (("forced balance", record.forced_balance_s), ("no plan beats", record.bound_s)):
        cells = {
            "Method": label,
            "Executed": "no",
            "Recompute and update": step_time(seconds),
            "Speedup over static": times(record["static"].training_s / seconds),
            "Share of forced balance": percentage(record.forced_balance_s / seconds),
            "Share of the bound": percentage(record.bound_s / seconds),
        }
        rows.append(TableRow(cells=tuple(cells.get(column.heading, "") for column in COLUMNS)))
    title = "Recompute and update, all modelled but the time of planning"
    return Table(title=title, columns=tuple(COLUMNS), rows=tuple(rows))


def simulation_finding(record: SimulationRecord) -> str:
    """What the methods are worth beside static and the strongest of the others, in one sentence."""
    static, main, baseline = record["static"], headline(record), strongest_baseline(record)
    by = "By the cost model" + (", and not executed" if static.not_executed else "")
    if main.name == "static":
        return (
            f"{by}, forced balance would make recompute and update "
            f"{as_fast(static.training_s, record.forced_balance_s)} static; no other method was simulated."
        )
    worth = f"{as_fast(static.training_s, main.training_s)} static"
    best = _fastest([method for method in record.methods if is_ours(method.name)] or [main])
    if baseline is not None:
        faster = as_fast(baseline.training_s, main.training_s)
        worth += f" and {faster} {named(baseline, record)}, the strongest other method"
    if main.training_s > AS_FAST * best.training_s:
        against = baseline or main
        worth += f"; {named(best, record)} is {as_fast(against.training_s, best.training_s)} {against.label}"
    if main.step_s <= AS_FAST * static.step_s:
        return f"{by}, {named(main, record)} makes recompute and update {worth}."
    longest = max(range(len(main.stages)), key=lambda stage: main.stages[stage] - static.stages[stage])
    added = f"{duration(main.stages[longest])} more of {main.stages._fields[longest].replace('_', ' ')}"
    return (
        f"{by}, {named(main, record)} makes the whole step {as_fast(static.step_s, main.step_s)} static, with {added}; "
        f"it makes recompute and update alone {worth}."
    )


def simulation_tiles(record: SimulationRecord) -> tuple[Tile, ...]:
    """What the method that the page is about saves, and the size of a step."""
    static, main = record["static"], headline(record)
    step = (
        Tile("tokens of a GPU in a micro-step", f"{record.tokens_per_rank:,.0f}", "on average"),
        Tile(
            "cells of a group in a step",
            f"{record.cells_per_group:,}",
            f"{record.groups_simulated} of {record.groups} group{'s' * (record.groups != 1)} simulated",
        ),
    )
    if main is static:
        return step
    hours = f"of {1000 * static.gpu_hours:,.3g} without balancing, by {named(main, record)}"
    saved = 1000 * main.gpu_hours_saved
    return (Tile(f"GPU-hours {'lost' if saved < 0 else 'saved'} in 1000 steps", f"{abs(saved):,.3g}", hours), *step)


def executed(record: SimulationRecord) -> str:
    """Which methods no executor carries out, and why."""
    if missing := record["static"].not_executed:
        return f"No executor carries out any of it: it takes {', '.join(missing)}."
    reasons: dict[tuple[str, ...], list[str]] = {}
    for method in record.methods:
        reasons.setdefault(method.not_executed, []).append(method.label)
    done = "; ".join(reasons.pop(()))
    rest = "".join(f" {'; '.join(labels)} would take {', '.join(missing)}." for missing, labels in reasons.items())
    return f"Executed in tests on CPU processes: {done}.{rest and f' Not executed:{rest}'} The two limits never are."


def named(method: MethodRecord, record: SimulationRecord) -> str:
    """The label, marked where no executor carries the method out. Where none carries out static, `modelled` says so."""
    is_marked = method.not_executed and not record["static"].not_executed
    return f"{method.label} (not executed)" if is_marked else method.label


def modelled(record: SimulationRecord) -> str:
    """What all seconds are, for axes."""
    return "modelled, not executed" if record["static"].not_executed else "modelled"


def headline(record: SimulationRecord) -> MethodRecord:
    """The method that the page is about: the first of ours, else the fastest of the others, else static."""
    ours, others = _balanced(record)
    return ours[0] if ours else _fastest(others or record.methods)


def compared_methods(record: SimulationRecord) -> list[MethodRecord]:
    """The few methods that plots compare with static: the headline, the fastest of ours, the fastest of the others."""
    ours, others = _balanced(record)
    chosen = [*ours[:1], *(_fastest(group) for group in (ours, others) if group)]
    return [method for n, method in enumerate(chosen) if method not in chosen[:n]]


def strongest_baseline(record: SimulationRecord) -> MethodRecord | None:
    """The fastest method that is neither static nor a plan of foreroute; None where the headline is that method."""
    _, others = _balanced(record)
    fastest = _fastest(others) if others else None
    return None if fastest is headline(record) else fastest


def _balanced(record: SimulationRecord) -> tuple[list[MethodRecord], list[MethodRecord]]:
    """Plans of ours, and the other methods but static."""
    balanced = [method for method in record.methods if method.name != "static"]
    return [one for one in balanced if is_ours(one.name)], [one for one in balanced if not is_ours(one.name)]


def is_ours(name: str) -> bool:
    """Whether the method of this short name is a plan of ours."""
    from foreroute.simulate.methods import PRESETS

    return name in PRESETS


def fit_table(found: FitRecord, before: Mapping[str, float]) -> Table:
    """One row per fitted parameter, with units; `before` has the configured values by name."""
    columns = (Column("Rate", "rate"), Column("Configured", "configured"), Column("Fitted", "fitted"))
    rows = [
        TableRow(cells=(name, _rate(name, before[name]), _rate(name, value)))
        for name, value in found.parameters.items()
    ]
    return Table(columns=columns, rows=tuple(rows))


def fit_summary(found: FitRecord) -> str:
    """How near the predictions are, in a sentence."""
    correlation = "not defined" if found.rank_correlation is None else f"{found.rank_correlation:.2f}"
    return (
        f"{len(found.names)} measured stages are predicted with a median error of {percentage(found.median_error)} and "
        f"a worst of {percentage(found.worst_error)}; the rank correlation is {correlation}. The rates "
        "were fitted to these very measurements."
    )


def _page(
    record: SimulationRecord,
    config: SimulateConfig,
    sweeps: Sequence[SweepRecord],
    timelines: Sequence[Timeline],
    fit: tuple[FitRecord, Mapping[str, float]] | None,
) -> Page:
    from foreroute.report import simulation_plots, sweep_plots

    plots = (
        *simulation_plots.timelines(timelines, record),
        simulation_plots.by_stage(record),
        simulation_plots.by_part(record),
    )
    planned = "measured: it was really done, on one thread of the machine that made this page"
    planning = planned if config.execution.planning_s is None else "configured"
    seconds_are = texts("simulation", modelled=modelled(record), planning=planning)
    sections = [PageSection(heading="Where the time goes", texts=seconds_are, plots=plots)]
    if sweeps:
        sections.append(
            PageSection(
                heading="What the gain depends on",
                texts=texts("sweeps"),
                keys=tuple(sweep_plots.legend(record)),
                plots=tuple(sweep_plots.sensitivities(record, config, sweeps)),
            )
        )
    rollout = f"with {step_time(record.rollout_s)} of rollout" if record.rollout_s else "without its rollout"
    notes = (executed(record), *texts("methods", rollout=rollout))
    sections.append(PageSection(heading="All methods", tables=(simulation_table(record),), notes=notes))
    if fit is not None:
        sections.append(
            PageSection(heading="Rates fitted to measurements", texts=(fit_summary(fit[0]),), tables=(fit_table(*fit),))
        )
    settings = tuple(TableRow(cells=setting) for setting in flattened(config.model_dump()).items())
    columns = (Column("Setting"), Column("Value", kind="words"))
    sections += [
        PageSection(heading="Assumed", notes=texts("assumed")),
        PageSection(heading="Not modelled", notes=texts("not_modelled")),
        PageSection(heading="Configuration", tables=(Table(columns=columns, rows=settings, folded="All settings"),)),
    ]
    return Page(
        command="foreroute simulate",
        title=f"One RL step on {record.gpus:,} GPUs",
        finding=simulation_finding(record),
        tiles=simulation_tiles(record),
        facts=record.facts,
        sections=tuple(sections),
    )


def _planned(method: MethodRecord, text: str) -> str:
    """Nothing of static, which plans nothing."""
    return "" if method.name == "static" else text


def _fastest(methods: tuple[MethodRecord, ...] | list[MethodRecord]) -> MethodRecord:
    return min(methods, key=lambda method: method.training_s)


def _rate(name: str, value: float) -> str:
    if name.endswith("_flops_per_s"):
        return f"{value / 1e12:,.4g} TFLOP/s"
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:,.4g} GB/s"
    return duration(value)
