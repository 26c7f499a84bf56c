"""A plan, what it was made for and what else was tried -> a table, tiles, plots, one page. It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from foreroute.costs.pricing import PART_NAMES
from foreroute.plan.capabilities import EXECUTES, EXECUTOR_NAMES, Ability, on_several_nodes
from foreroute.plan.options import PASS_NAMES
from foreroute.report.figure import PART_COLOURS, heat_maps, layer_label
from foreroute.report.format import duration, over_mean, percentage, size, step_time, time_unit, times
from foreroute.report.methods import BOUND, method_table, passes_by_part, settings_table, worth
from foreroute.report.page import Caption, Column, Page, PageSection, Plot, Table, TableRow, Tile, Tone, write_page

if TYPE_CHECKING:
    from foreroute.costs.cluster_file import Cluster
    from foreroute.plan.received_rows import Reservation
    from foreroute.plan.step_plan import StepPlan
    from foreroute.simulate.compare import PlanComparison
    from foreroute.simulate.records import PricedMethod
    from foreroute.trace import RoutedLayer

HOME = "without balancing"
"""The title of what is there without a plan, on plots."""
HEADINGS = (
    "Method",
    "Slowest rank over mean",
    "In 99 % of cells",
    "In the worst cell",
    "Recompute and update, modelled",
    "Homes move in, modelled",
    "Speedup over static, home moves too",
    "Experts fetched per cell",
    "Homes moved",
    "Served across nodes",
    "Planning time",
)
NOTES = (
    "All methods serve the same counts with the same slots.",
    "A cell is one routed layer in one micro-step and lasts as long as its slowest rank, whose load over the mean is "
    "given on average over all cells, as 99 % of the cells do not exceed it, and in the worst. Both passes count.",
    "A pass in which the plan saves less than 1 % of the modelled time runs with every expert at its home; the row "
    "“foreroute” has what is executed. Where traffic between nodes counts, a plan leaves more to the slowest rank "
    "than its tolerance.",
    "An assignment is served across nodes when its expert is on another node than its token.",
    "Times of the step come from a cost model, which leaves out overlap, jitter and congestion. Planning time is "
    "measured on the machine that made this page, from counts to token splits, in seconds of its processors; the step "
    "has none of it, nor votes, nor publishing.",
    "Homes move before the step, with optimizer state, in the time beside it, and the speedup counts that as the cost "
    "of each step; homes that move once and then stay cost it once. Static moves none. What the plan saves in a pass "
    "is a share of that pass with every expert at its home under the plan, where it has moved already.",
    "The lower bound is the least that any plan can reach: with these slots for loads; for times, level experts and "
    "empty links, which no real plan attains.",
)
WAY_HEADINGS = (
    "Method",
    "Slowest rank over mean",
    "Recompute and update, modelled",
    "Homes move in, modelled",
    "Homes moved, once",
    "Weights fetched in a pass",
)
WAY_NOTES = (
    "Bold is the first way that takes hardly longer in this step than the fastest, home moves too: what comes below it "
    "does little more. Seconds are of the cost model, planning aside.",
    "Sequences are exchanged between micro-steps, so that experts at their homes are level. Homes move once, before "
    "the step, with optimizer state. Neither takes a replica. Loads are on average over all cells, bytes of a rank.",
    "Any framework takes packed sequences.",
)
TONES: tuple[Tone, Tone, Tone] = ("warning", "note", "fine")
"""Tones by the number of passes that run by the plan."""


def write_plan_page(
    found: PlanComparison,
    facts: Mapping[str, str],
    target: Path,
    *,
    cluster: Cluster | None = None,
    layers: Sequence[RoutedLayer] = (),
    ways: Sequence[PricedMethod] = (),
    rows: Sequence[Table] = (),
) -> Path:
    """Write the page; raises `InputError` as `page.write_page`.

    `facts` say what was planned, how and when; `cluster` has the rates and sizes that seconds stand on; `layers` are L,
    where the model's own numbers of them are known; `ways` say what is reached with less than the plan;
    `rows` are tables of `rows_table`.
    """

    def page() -> Page:
        plots = (load_of_cells(found, layers), time_by_part(found))
        return Page(
            command="foreroute plan",
            title="Plan of a step",
            finding=plan_finding(found, ways),
            tone=TONES[len(found.passes_by_plan) if found.pays else 0],
            tiles=plan_tiles(found, cluster),
            facts=facts,
            sections=(
                PageSection(heading="Before and after", plots=plots),
                *([_ways(ways)] if ways else []),
                PageSection(heading="Against other balancers", tables=(plan_table(found),), notes=NOTES),
                *([PageSection(heading="Rows that buffers must hold", tables=tuple(rows))] if rows else []),
                *_rates(cluster),
            ),
        )

    return write_page(target, page)


def plan_table(found: PlanComparison) -> Table:
    """One row per method, and one for what no plan can beat."""
    static_s, least_ML = found.methods[0].training_s, found.least_over_mean_ML
    limits = {
        "Slowest rank over mean": over_mean(float(least_ML.mean())),
        "In 99 % of cells": over_mean(float(np.quantile(least_ML, 0.99))),
        "In the worst cell": over_mean(float(least_ML.max())),
        "Recompute and update, modelled": step_time(found.least_s),
        "Speedup over static, home moves too": times(static_s / found.least_s),
    }
    title = "The step by method, all modelled but the time of planning"
    return method_table(
        found.methods, HEADINGS, {BOUND: limits}, title=title, strong=lambda one: one is found.methods[-1]
    )


def ways_table(ways: Sequence[PricedMethod]) -> Table:
    """One row per way to level the step, from what moves nothing to the plan."""
    from foreroute.simulate.ways import simplest

    simple, title = simplest(ways), "What packing, homes and replicas reach here"
    return method_table(ways, WAY_HEADINGS, {}, title=title, strong=lambda one: one is simple)


def executors_of_ways() -> dict[str, str]:
    """Name who can do what a way needs, by the need, in words."""
    return {
        str(needed): ", ".join(EXECUTOR_NAMES[name] for name, abilities in EXECUTES.items() if needed in abilities)
        for needed in (Ability.HOME_MOVES, Ability.REPLICAS)
    }


def rows_table(policies: Sequence[Reservation], served: str) -> Table:
    """One row per policy; `served` says by what experts are hosted, in which pass."""
    columns = ("Reserved for received rows", "largest\nbuffer", "cells\noverflow", "rows\ndropped", "unused")
    rows = [
        TableRow(
            cells=(
                one.name,
                f"{one.largest:,}",
                percentage(one.overflowing_cells),
                percentage(one.dropped),
                percentage(one.unused),
            ),
            strong=one.name.startswith("known"),
        )
        for one in policies
    ]
    shown = tuple(Column(heading.replace("\n", " ").capitalize(), heading) for heading in columns)
    return Table(title=f"Rows that ranks receive {served}", columns=shown, rows=tuple(rows))


def plan_finding(found: PlanComparison, ways: Sequence[PricedMethod] = ()) -> str:
    """Decision whether to use the plan, its worth, and whether less than the plan would do, in a few sentences."""
    known = on_several_nodes(found.plan.topology.num_nodes)
    return " ".join(filter(None, (_verdict(found), known, _left_out(found), _instead(found, ways))))


def _instead(found: PlanComparison, ways: Sequence[PricedMethod]) -> str:
    """Say what would do as well in this step and the next, where the plan is to be used."""
    from foreroute.simulate.ways import simplest

    # ways are compared as if both passes ran by them
    if not ways or found.passes_by_plan != list(PASS_NAMES) or not found.pays:
        return ""
    less, plan = simplest(ways, next_steps=True, once_s=found.once_s), ways[-1]
    packed = "sequences packed by routes"
    if less.name == "packing":
        what = f"{packed.capitalize()} do"
    elif less.name == "homes":
        too = f"{packed} and " if any(way.name == "packing" for way in ways) else ""
        what = f"If the next steps route alike, {too}homes that move once do"
    else:
        return ""
    planning = ", planning too" if found.once_s else ""
    return (
        f"{what} as well without the plan: recompute and update take {step_time(less.training_s)}, and "
        f"{step_time(plan.training_s + found.once_s)} under it{planning}."
    )


def _verdict(found: PlanComparison) -> str:
    from foreroute.simulate.records import AS_PLANNED, strongest_other

    static, executed = found.methods[0], found.methods[-1]
    # where both passes run by the plan, what was planned is what is executed
    planned = next((one for one in found.methods if one.name == AS_PLANNED), executed)
    other = strongest_other(found.methods)
    # what is executed is compared, not what was planned
    gain = worth(static.step_s, executed.step_s, *(() if other is None else (other.step_s, other.label)))
    moves = f"homes that move in {duration(executed.moves_s)}, " if executed.moves_s else ""
    loads = {name: over_mean(one.imbalance) for name, one in (("home", static), ("plan", planned))}
    both = f"the slowest rank has {loads['plan']} times the mean load, and {loads['home']} times without balancing"
    passes = found.passes_by_plan
    # whether to use it comes before what it is worth
    if passes and not found.pays:
        if found.saved_s <= 0:
            return f"Do not use the plan: by the cost model, {moves}recompute and update are {gain}; {both}."
        taken = [f"{duration(found.waited_s)} of planning (measured)"] * bool(found.unpriced)
        taken += [f"{duration(found.once_s)} of all that is priced (modelled)"] * bool(found.once_s)
        return (
            f"Do not use the plan{' in a step that waits for its planning' * bool(found.unpriced)}: once a step it "
            f"takes {' and '.join(taken)}, and it saves {duration(found.saved_s)} (modelled). Without that, {moves}"
            f"recompute and update are {gain}, by the cost model; {both}."
        )
    if len(passes) == 2:
        return f"Use the plan: by the cost model, {moves}recompute and update are {gain}; {both}."
    if passes:
        (home,) = {"recompute", "update"} - set(passes)
        return (
            f"Use the plan in the {passes[0]}; the {home} runs with every expert at its home, since the plan would "
            f"save too little there. By the cost model, {moves}recompute and update are together {gain}; by the plan "
            f"{both}."
        )
    # no replicas, so there is nothing that a pass could decline
    if not len(found.plan.hosts.expert_R):
        return (
            f"There is nothing to use: the plan has no replicas. Every expert serves at its home, where the slowest "
            f"rank has {over_mean(executed.imbalance)} times the mean load. By the cost model, {moves}recompute and "
            f"update are together {gain}."
        )
    return (
        f"Do not use the plan: both passes run with every expert at its home, where the slowest rank has "
        f"{over_mean(executed.imbalance)} times the mean load. Under the plan it would have {loads['plan']} times the "
        f"mean, and {moves}recompute and update would be {worth(static.step_s, planned.step_s)}, by the cost model, "
        "without what a plan takes once a step: planning, publishing, votes."
    )


def _left_out(found: PlanComparison) -> str:
    """Say what a verdict for the plan leaves out, since the cost model has it at 0."""
    if not (found.unpriced and found.passes_by_plan):
        return ""
    keys = {"planning": "plan_s_per_count", "votes": "begin_s"}
    what, named = (" and ".join(words) for words in (found.unpriced, [keys[what] for what in found.unpriced]))
    took, saved = duration(found.waited_s), duration(found.saved_s)
    beside = f" Planning took {took} here (measured), and the plan saves {saved} (modelled)." * found.pays
    return (
        f"{what.capitalize()} {'are' if len(found.unpriced) > 1 else 'is'} priced at 0 ({named} of [costs]); "
        f"“foreroute measure” times and prices them.{beside} A step waits for planning that nothing else hides."
    )


def planning_words(found: PlanComparison, threads: int) -> str:
    """Say how long planning took, by the processors and the clock."""
    return (
        f"{found.plan.max_load_ML.size} cells in {duration(found.methods[-1].planning_s)} of the processors, "
        f"{duration(found.elapsed_s)} by the clock, with {'one thread' if threads == 1 else f'{threads} threads'}"
    )


def plan_tiles(found: PlanComparison, cluster: Cluster | None = None) -> tuple[Tile, ...]:
    """Replicas, distance from the bound, and memory of slots of the plan, were it to serve both passes."""
    over_mean_ML = found.planned.over_mean_SMLG[0].max(axis=-1)
    gap_ML = over_mean_ML / found.least_over_mean_ML - 1
    # replicas and fetches differ, and a reader would take one for the other
    kept = found.plan.num_replicas_ML.mean() - found.planned.fetches_SML[0].mean()
    return (
        Tile(
            "replicas in a cell",
            f"{found.plan.num_replicas_ML.mean():.1f}",
            f"{max(kept, 0):.1f} stay in their slots from a micro-step before, the others are fetched",
        ),
        Tile(
            "slowest rank above the least possible, median",
            percentage(float(np.median(gap_ML))),
            f"{percentage(float(gap_ML.max()))} at most, with these homes and slots",
        ),
        *(() if cluster is None else _slot_memory(found.plan, cluster)),
    )


def _slot_memory(plan: StepPlan, cluster: Cluster) -> tuple[Tile, ...]:
    """Bytes of the slots of a rank; nothing where the plan fills none."""
    # a layer has slots from its first replica on
    slots, num_layers = plan.topology.redundant_slots, int(plan.num_replicas_ML.any(axis=0).sum())
    if not num_layers:
        return ()
    sets, where = num_layers, f"{slots} in each layer with a replica"
    if plan.slots == "shared":
        sets = min(num_layers, 1 + cluster.costs.prefetch)
        where = f"{sets * slots} that layers share"
    set_bytes = slots * cluster.costs.model.expert_bytes
    beside = f"gradients of a layer's replicas take up to {size(set_bytes)} more, optimizer state none"
    return (Tile("weights in the slots of a rank", size(sets * set_bytes), f"{where}; {beside}"),)


def load_of_cells(found: PlanComparison, layers: Sequence[RoutedLayer]) -> Plot:
    """The slowest rank of every cell."""
    said = Caption(
        title="The slowest rank of every cell",
        sentence="Its load over the mean of the cell, in all layers and micro-steps.",
        x_label="micro-step",
        y_label=layer_label(layers),
    )
    sides = {HOME: found.at_home, _planned(found): found.planned}
    loads = {title: side.over_mean_SMLG[0].max(axis=-1).T for title, side in sides.items()}
    return heat_maps(said, loads, layers=layers)


def time_by_part(found: PlanComparison) -> Plot:
    """Modelled time by part, as executors serve the plan."""
    methods = {HOME: found.methods[0], "as executed": found.methods[-1]}
    parts = [parts for one in methods.values() for parts in (one.recompute_parts, one.update_parts)]
    unit, unit_s = time_unit(max(sum(each.values()) for each in parts))
    said = Caption(
        title="Where the time goes (modelled)",
        sentence="Recompute and update by the cost model, not measured: without balancing and as executed.",
        x_label=f"{unit}, modelled",
        y_label="",
    )
    return passes_by_part(said, methods, {part: PART_COLOURS[part] for part in PART_NAMES}, unit_s=unit_s)


def _planned(found: PlanComparison) -> str:
    """The title of what the plan does: it says where that is not executed."""
    passes = found.passes_by_plan
    return "by the plan" + ("" if len(passes) == 2 else f" ({passes[0]})" if passes else " (not run)")


def _ways(ways: Sequence[PricedMethod]) -> PageSection:
    """The ways to level the step, and which frameworks can go them."""
    able = (f"{what[0].upper()}{what[1:]}: {names}." for what, names in executors_of_ways().items())
    unknown = () if any(way.name == "packing" for way in ways) else ("Counts say no sequences that could be packed.",)
    return PageSection(heading="With less than a plan", tables=(ways_table(ways),), notes=(*WAY_NOTES, *unknown, *able))


def _rates(cluster: Cluster | None) -> list[PageSection]:
    """Every key of a topology file with which the seconds can be computed again."""
    from foreroute.costs.cluster_file import described

    tables = () if cluster is None else (settings_table(described(cluster), "All rates and sizes"),)
    return [PageSection(heading="What the seconds stand on", tables=tables)] if tables else []
