"""A simulated step -> tables, sentences, plots, one page. It computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foreroute.plan.capabilities import SEVERAL_NODES, Ability
from foreroute.report.figure import PART_COLOURS, stacked_bars
from foreroute.report.format import AS_FAST, as_fast, duration, percentage, rate, step_time, times
from foreroute.report.methods import BOUND, method_table, modelled, named, passes_by_part, settings_table, worth
from foreroute.report.page import Caption, Column, Page, PageSection, Plot, Table, TableRow, Tile, write_page

if TYPE_CHECKING:
    from foreroute.simulate import SimulateConfig, SimulationRecord
    from foreroute.simulate.fit import FitRecord

HEADINGS = (
    "Method",
    "Executed",
    "Recompute and update, modelled",
    "Speedup over static",
    "Share of forced balance",
    "Share of the bound",
    "Slowest rank over mean",
    "Wait for the plan",
    "Home moves",
    "Exposed transfers",
    "Experts fetched per cell",
    "Planning time",
    "GPU-hours saved",
)

PHASE_COLOURS = {
    "planning": PART_COLOURS["waiting for the plan"],
    "home moves": "#EEDD88",
    "publishing": "#BBCC33",
    "recompute": "#C9D3DE",
    "update": "#9AA9B8",
    "reduction": "#FFAABB",
    "optimizer": "#44BB99",
}
METHODS = (
    "All methods serve the same tokens, and are compared by the time of recompute and update.",
    "A cell is one routed layer in one micro-step; the load of its slowest rank over the mean is given on average "
    "over all cells.",
    "Exposed transfers are the share of recompute and update in which ranks wait for weights or gradients that move.",
    "A method is executed when a test runs all that it takes with an executor of foreroute, on CPU processes and at "
    "small sizes.",
    "Forced balance: every source GPU sends the same number of assignments to every expert, give or take one, "
    "experts serve at their homes, and nothing moves. It is not a lower bound: a plan that keeps tokens in their "
    "node sends less than uniform traffic does, and can exceed 100 %.",
    "No plan beats the lower bound: the experts' work in one piece and spread evenly over all GPUs, all-to-alls that "
    "take their latency alone, free transfers. No real plan attains it.",
)
ASSUMED = (
    "The ranks of a group meet at every dispatch and every combine; an all-to-all lasts as long as its busiest link.",
    "Copies from host memory run beside everything else. Fetches and gradients from GPU to GPU use the links only "
    "while no all-to-all does.",
    "Gradients of replicas return in the background; what is left of them at the end of the update is waited for.",
    "Groups wait for the slowest one after the recompute and after the update. Then gradients are reduced over the "
    "groups and the optimizer steps, with nothing beside them.",
    "Layers and groups that were drawn stand in turn for all others.",
    "Planning begins when the rollout ends. The recompute starts when all is planned.",
    "A pass in which a plan saves less than 1 % of the modelled time runs with every expert at its home, as "
    "executors run it.",
    "Ranks copy their experts to host memory before the recompute, with nothing beside it.",
)
NOT_MODELLED = (
    "The rollout itself, and whatever else shares the cluster.",
    "Jitter, slow GPUs, launch gaps, congestion between groups, and copies that slow kernels down.",
    "Tensor, context and pipeline parallelism.",
    "Whether weights, slots, activations and optimizer state fit into memory.",
    "That the experts of a token depend on each other, which matters to deduplicated dispatch.",
    "Failures: a transfer that is late or lost ends the step.",
)


def write_simulation_page(
    record: SimulationRecord, config: SimulateConfig, target: Path, *, fit: FitRecord | None = None
) -> Path:
    """Write the page of a simulation, and of the fit of its rates; raises `InputError` as `page.write_page`."""
    return write_page(target, lambda: _page(record, config, fit))


def simulation_table(record: SimulationRecord) -> Table:
    """One row per method in the order of the record; then the two limits."""
    limits = {
        label: {
            "Executed": "no",
            "Recompute and update, modelled": step_time(seconds),
            "Speedup over static": times(record["static"].training_s / seconds),
            "Share of forced balance": percentage(record.forced_balance_s / seconds),
            "Share of the bound": percentage(record.bound_s / seconds),
        }
        for label, seconds in (("forced balance", record.forced_balance_s), (BOUND, record.bound_s))
    }
    title = "Recompute and update, all modelled but the time of planning"
    return method_table(record.methods, HEADINGS, limits, title=title, strong=lambda one: one.is_plan)


def simulation_finding(record: SimulationRecord) -> str:
    """Worth of the methods beside static and the strongest of the others, in one sentence."""
    from foreroute.simulate.records import fastest_plan, headline, strongest_other

    static, main, other = record["static"], headline(record.methods), strongest_other(record.methods)
    by = "By the cost model" + (", and not executed" if static.not_executed else "")
    if main.name == "static":
        return (
            f"{by}, forced balance would make recompute and update "
            f"{as_fast(static.training_s, record.forced_balance_s)} static; no other method was simulated."
        )
    beside = () if other is None else (other.training_s, named(other, record))
    gain, best = worth(static.training_s, main.training_s, *beside), fastest_plan(record.methods)
    # the page is about the first plan of the configuration, which need not be the fastest
    if main.training_s > AS_FAST * best.training_s:
        against = other or main
        gain += f"; {named(best, record)} is {as_fast(against.training_s, best.training_s)} {against.label}"
    whole = min(record.methods, key=lambda one: one.step_s)
    if main.step_s > AS_FAST * whole.step_s and whole is not static:
        gain += f"; whole steps, with the wait for plans and moves of homes, are shortest with {named(whole, record)}"
    if main.step_s <= AS_FAST * static.step_s:
        return f"{by}, {named(main, record)} makes recompute and update {gain}."
    # a faster pass may be bought by planning or moves; the finding must not hide it
    longest = max(range(len(main.phases)), key=lambda phase: main.phases[phase] - static.phases[phase])
    added = f"{duration(main.phases[longest])} more of {main.phases._fields[longest].replace('_', ' ')}"
    return (
        f"{by}, {named(main, record)} makes the whole step {as_fast(static.step_s, main.step_s)} static, with {added}; "
        f"it makes recompute and update alone {gain}."
    )


def beside_ranking(record: SimulationRecord) -> str:
    """Say what a step takes beside recompute and update, by which methods are ranked."""
    rollout = f"with {step_time(record.rollout_s)} of rollout" if record.rollout_s else "without its rollout"
    return (
        "Speedups leave out the wait for the plan, home moves and publishing, which come before the recompute. "
        f"GPU-hours count all phases of the step, {rollout}, reduction and optimizer among them. Votes are in neither."
    )


def simulation_tiles(record: SimulationRecord) -> tuple[Tile, ...]:
    """Savings of the method that the page is about, and the size of a step."""
    from foreroute.simulate.records import headline

    static, main = record["static"], headline(record.methods)
    step = (
        Tile("tokens of a GPU in a micro-step", f"{record.tokens_per_rank:,.0f}", "on average"),
        Tile(
            "cells of a group in a step",
            f"{record.cells_per_group:,}",
            f"{record.groups_simulated} of {record.groups} group{'s' * (record.groups != 1)} simulated",
        ),
    )
    # nothing is saved by what was not simulated
    if main is static:
        return step
    hours = f"of {1000 * static.gpu_hours:,.3g} for whole steps without balancing, by {named(main, record)}"
    saved = 1000 * main.gpu_hours_saved
    return (Tile(f"GPU-hours {'lost' if saved < 0 else 'saved'} in 1000 steps", f"{abs(saved):,.3g}", hours), *step)


def executed(record: SimulationRecord) -> str:
    """Say which methods no executor carries out, and why."""
    if missing := record["static"].not_executed:
        known = f" {SEVERAL_NODES}" if Ability.NODES in missing else ""
        return f"Nothing of it has been executed as it is simulated: it takes {', '.join(missing)}.{known}"
    # methods that lack the same are named together
    reasons: dict[tuple[str, ...], list[str]] = {}
    for method in record.methods:
        reasons.setdefault(method.not_executed, []).append(method.label)
    done = "; ".join(reasons.pop(()))
    rest = "".join(f" {'; '.join(labels)} would take {', '.join(missing)}." for missing, labels in reasons.items())
    return f"Executed in tests on CPU processes: {done}.{rest and f' Not executed:{rest}'} The two limits never are."


def fit_table(found: FitRecord) -> Table:
    """One row per fitted parameter, with units."""
    columns = (Column("Rate", "rate"), Column("Configured", "configured"), Column("Fitted", "fitted"))
    rows = [
        TableRow(cells=(name, rate(name, found.before[name]), rate(name, value)))
        for name, value in found.parameters.items()
    ]
    return Table(columns=columns, rows=tuple(rows))


def fit_summary(found: FitRecord) -> str:
    """Nearness of the predictions, in a sentence."""
    return (
        f"{len(found.names)} measured passes are predicted with a median error of {percentage(found.median_error)} and "
        f"a worst of {percentage(found.worst_error)}. The rates were fitted to these very measurements."
    )


def by_phase(record: SimulationRecord) -> Plot:
    """The whole step of every method."""
    said = Caption(
        title="The step by method",
        sentence="From the end of the rollout to new weights. Planning is only what the recompute waits for.",
        x_label=f"seconds, {modelled(record)}",
        y_label="",
    )
    bars = [(named(method, record), tuple(method.phases)) for method in record.methods]
    return stacked_bars(said, bars, PHASE_COLOURS)


def by_part(record: SimulationRecord) -> Plot:
    """Recompute and update of the methods that matter, by what they are spent on."""
    from foreroute.simulate.records import compared

    methods = {named(method, record): method for method in (record["static"], *compared(record.methods))}
    said = Caption(
        title="What recompute and update are spent on",
        sentence=(
            "Seconds of the slowest expert-parallel group. All-to-alls and experts last as long as their slowest "
            "rank; exposed transfers are waits for weights and gradients that move. Waiting for the plan delays the "
            "recompute and counts as planning elsewhere."
        ),
        x_label=f"seconds, {modelled(record)}",
        y_label="",
    )
    return passes_by_part(said, methods, PART_COLOURS)


def _page(record: SimulationRecord, config: SimulateConfig, fit: FitRecord | None) -> Page:
    plots = (by_phase(record), by_part(record))
    planned = "measured: it was really done, on one thread of the machine that made this page"
    planning = planned if config.execution.planning_s is None else "configured"
    seconds_are = (
        f"All times are {modelled(record)}: they come from a cost model of this cluster and this model, on routing "
        f"that was drawn or given; nothing was measured on GPUs. Planning alone is {planning}."
    )
    sections = [PageSection(heading="Where the time goes", texts=(seconds_are,), plots=plots)]
    notes = (executed(record), *METHODS[:2], beside_ranking(record), *METHODS[2:])
    sections.append(PageSection(heading="All methods", tables=(simulation_table(record),), notes=notes))
    if fit is not None:
        sections.append(
            PageSection(heading="Rates fitted to measurements", texts=(fit_summary(fit),), tables=(fit_table(fit),))
        )
    sections += [
        PageSection(heading="Assumed", notes=ASSUMED),
        PageSection(heading="Not modelled", notes=NOT_MODELLED),
        PageSection(heading="Configuration", tables=(settings_table(config.model_dump(), "All settings"),)),
    ]
    return Page(
        command="foreroute simulate",
        title=f"One RL step on {record.gpus:,} GPUs",
        finding=simulation_finding(record),
        tiles=simulation_tiles(record),
        facts=record.facts,
        sections=tuple(sections),
    )
