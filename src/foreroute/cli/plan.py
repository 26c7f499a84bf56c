"""`foreroute plan`: plan a step, compare with other balancers, write the plan and a page."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

import foreroute
from foreroute.cli.plan_inputs import StepToPlan, read_step
from foreroute.cli.terminal import Console, shown_facts, shown_table, shown_tiles, working, write_page
from foreroute.errors import InputError, PlanError
from foreroute.files.writing import check_writable, writing_named
from foreroute.plan import PlanOptions, save_plan, verify
from foreroute.plan.capabilities import EXECUTES, Ability
from foreroute.plan.plan_file import PLAN_FILE
from foreroute.report.format import duration
from foreroute.report.page import check_page
from foreroute.report.plan import cost_words, plan_finding, plan_table, plan_tiles, write_plan_page
from foreroute.simulate.compare import compare_plan, compile_planner, timed_plan
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
    """Plan what `read_step` makes of `inputs`, print the table, write `output` and the page beside it."""
    page = output.with_suffix(".html")
    _check_target(output, page, overwrite)
    console = Console()
    with working("reading the step", console):
        step = read_step(topology, **inputs)
    problem = step.problem
    facts = {**step.facts, **_facts(step, options), "costs": cost_words(step.cluster)}
    console.print(shown_facts(facts))
    with working("planning the first micro-step, which compiles once on a machine", console):
        compile_planner(problem, options)
    cells = step.counts_MLGE.shape[0] * step.counts_MLGE.shape[1]
    with working("planning", console, total=cells, unit="cells") as work:
        found = timed_plan(problem, options, work.advance)
    found = replace(found, plan=replace(found.plan, packing=step.packing, tokens_digest=step.tokens_digest))
    threads = "one thread" if options.threads == 1 else f"{options.threads} threads"
    console.print(f"{'planned':<9} {cells} cells in {duration(found.elapsed_s)} with {threads}", highlight=False)
    console.print(shown_facts(found.why))
    with working("verifying and writing the plan", console), writing_named(output, PlanError):
        verify(found.plan, step.counts_MLGE, options)
        save_plan(found.plan, output, overwrite=overwrite)
    console.print(f"{'plan':<9} {output}, {output.stat().st_size:,} bytes, verified", soft_wrap=True, markup=False)
    balancers = BALANCERS if baselines else {"static": BALANCERS["static"]}
    with working("comparing with other balancers", console, total=len(balancers)) as work:
        compared = compare_plan(found, problem, balancers, work.advance)
    console.print(shown_table(plan_table(compared)))
    console.print(plan_finding(compared), highlight=False, markup=False)
    console.print(shown_tiles(plan_tiles(compared)))
    execute = {}
    if compared.passes_by_plan:
        way = f"foreroute.plan.load_plan({output.name!r}), then routed.execute: docs/experts.md, docs/megatron.md"
        if step.topology.num_nodes > 1 and not any(Ability.NODES in abilities for abilities in EXECUTES.values()):
            way += ". No plan has run on several nodes, so that times may be others"
        execute = {"execute": way}
        console.print(shown_facts(execute))
    made = {"made": f"foreroute {foreroute.__version__}, {date.today()}: {shlex.join(['foreroute', *sys.argv[1:]])}"}
    all_facts = facts | found.why | execute | made
    write_page(
        console,
        lambda: write_plan_page(compared, all_facts, page, cluster=step.cluster, layers=step.layers),
    )


def _check_target(output: Path, page: Path, overwrite: bool) -> None:
    """Refuse files that cannot be written or may not be replaced, before anything is planned."""
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
    """Say what is planned, for people."""
    num_micro_steps, num_layers, num_ranks, num_experts = step.counts_MLGE.shape
    topology = step.topology
    sooner = ", or sooner where traffic between nodes counts" if topology.num_nodes > 1 else ""
    moves = "any number of homes may move" if options.home_moves is None else "homes stay"
    switched = [
        f"stops at {1 + options.tolerance:g} times the mean load{sooner}",
        f"at most {options.home_moves} homes move per layer" if options.home_moves else moves,
        "slots shared by the layers" if options.slots == "shared" else "slots of every layer's own",
    ]
    return {
        "step": f"{num_micro_steps} micro-step{'s' * (num_micro_steps > 1)} of {num_layers} layers, "
        f"{num_experts} experts, {int(step.counts_MLGE.sum(dtype=np.int64)):,} assignments",
        "cluster": f"{num_ranks} ranks in nodes of {topology.ranks_per_node}, redundant slots per rank: "
        f"{topology.redundant_slots}",
        "options": ", ".join(switched),
    }
