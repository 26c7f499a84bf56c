"""`foreroute plan`: plan a step, compare with other balancers, write the plan and a page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from foreroute.cli.plan_inputs import StepToPlan, read_step
from foreroute.cli.terminal import Console, shown_facts, shown_table, shown_tiles, working, write_page
from foreroute.errors import InputError, PlanError
from foreroute.files.writing import check_writable, writing_named
from foreroute.plan import PlanOptions, StepPlan, save_plan, verify
from foreroute.plan.plan_file import PLAN_FILE
from foreroute.planner import plan, plan_and_why
from foreroute.report.format import duration
from foreroute.report.page import check_page
from foreroute.report.plan import plan_finding, plan_table, plan_tiles, write_plan_page
from foreroute.simulate.balancers import Balancer, BalancerInput
from foreroute.simulate.compare import MethodFigures, compare, facts_of, figures_of
from foreroute.simulate.methods import BALANCERS


def run_plan(
    topology: Path,
    options: PlanOptions,
    output: Path,
    *,
    baselines: bool,
    overwrite: bool,
    **inputs: Any,
) -> None:
    """Plan a step, print the table, write `output` and the page beside it.

    Args:
        topology: a TOML file.
        options: of the planner.
        output: the plan file; the page is the same with the suffix .html.
        baselines: whether to compare with all other balancers that can be had.
        overwrite: whether a plan and a page that exist may be replaced.
        **inputs: of `read_step`: what to plan.

    Raises:
        InputError: for everything that a user can mend.
    """
    page = output.with_suffix(".html")
    _check_target(output, page, overwrite)
    console = Console()
    with working("reading the step", console):
        step = read_step(topology, **inputs)
    facts = {**step.facts, **_facts(step, options)}
    console.print(shown_facts(facts))
    found, priced_options, planning_s = _planned(step, options, console)
    facts |= priced_options
    console.print(shown_facts(priced_options))
    with working("verifying and writing the plan", console), writing_named(output, PlanError):
        verify(found, step.counts_MLGE, options)
        save_plan(found, output, overwrite=overwrite)
    console.print(f"{'plan':<9} {output}, {output.stat().st_size:,} bytes, verified", soft_wrap=True, markup=False)
    records = _others(step, BALANCERS if baselines else {"static": BALANCERS["static"]}, console)
    with working("pricing every cell", console):
        records.append(figures_of(found, step.counts_MLGE, step.costs, label="foreroute", planning_s=planning_s))
        seen = facts_of(found, step.counts_MLGE, step.costs)
    console.print(shown_table(plan_table(records, seen)))
    console.print(plan_finding(records), highlight=False, markup=False)
    console.print(shown_tiles(plan_tiles(found, seen, records)))
    write_page(console, lambda: write_plan_page(found, seen, records, facts, page, layers=step.layers))


def _check_target(output: Path, page: Path, overwrite: bool) -> None:
    if output == page:
        raise InputError(f"--output {output} is the name of the page; name the plan file, for example plan.safetensors")
    for path in (output, page):
        with writing_named(path, PlanError):
            if path.exists() and (path.is_dir() or not overwrite):
                raise PlanError(f"{path} already exists; pass another --output, or --overwrite to replace it")
            check_writable(path)
    check_page(page)
    if output.exists() and output.stat().st_size and not PLAN_FILE.is_in(output):
        raise PlanError(f"{output} is no plan, which is all that --overwrite replaces; nothing was changed")


def _facts(step: StepToPlan, options: PlanOptions) -> dict[str, str]:
    num_micro_steps, num_layers, num_ranks, num_experts = step.counts_MLGE.shape
    topology, costs = step.topology, step.costs
    switched = [
        f"stops at {1 + options.tolerance:g} times the mean",
        f"at most {options.home_moves} homes move per layer" if options.home_moves else "homes stay",
        "slots shared by the layers" if options.slots == "shared" else "slots of every layer's own",
    ]
    return {
        "step": f"{num_micro_steps} micro-step{'s' * (num_micro_steps > 1)} of {num_layers} layers, "
        f"{num_experts} experts, {int(step.counts_MLGE.sum(dtype=np.int64)):,} assignments",
        "cluster": f"{num_ranks} ranks in nodes of {topology.ranks_per_node}, redundant slots per rank: "
        f"{topology.redundant_slots}",
        "costs": f"{costs.model.expert_bytes / 1e6:.3g} MB an expert, dispatch "
        f"{'without duplicates' if costs.dispatcher == 'dedup' else 'of every copy'}",
        "options": ", ".join(switched),
    }


def _planned(step: StepToPlan, options: PlanOptions, console: Console) -> tuple[StepPlan, dict[str, str], float]:
    """Plan the step; returns the plan, why priced options were on or off, and processor seconds without compiling."""
    with working("planning the first micro-step, which compiles once on a machine", console):
        plan(step.counts_MLGE[:1], step.topology, options, home_LE=step.home_LE, costs=step.costs)
    cells = step.counts_MLGE.shape[0] * step.counts_MLGE.shape[1]
    with working("planning", console, total=cells, unit="cells") as work:
        before, before_cpu = time.perf_counter(), time.process_time()
        found, why = plan_and_why(
            step.counts_MLGE,
            step.topology,
            options,
            home_LE=step.home_LE,
            costs=step.costs,
            on_progress=work.advance,
        )
        elapsed_s, planning_s = time.perf_counter() - before, time.process_time() - before_cpu
    threads = "one thread" if options.threads == 1 else f"{options.threads} threads"
    found = replace(found, packing=step.packing, tokens_digest=step.tokens_digest)
    console.print(f"{'planned':<9} {cells} cells in {duration(elapsed_s)} with {threads}", highlight=False)
    return found, {name.replace("_", "-"): reason for name, reason in why.items()}, planning_s


def _others(step: StepToPlan, balancers: Mapping[str, Balancer], console: Console) -> list[MethodFigures]:
    """Compare with other balancers: their records, static first."""
    problem = BalancerInput(step.counts_MLGE, step.topology, step.home_LE, step.previous_LE)
    records = []
    with working("comparing with other balancers", console, total=len(balancers)) as work:
        for done, record in enumerate(compare(problem, step.costs, balancers), 1):
            work.advance(done, len(balancers))
            records.append(record)
    return records
