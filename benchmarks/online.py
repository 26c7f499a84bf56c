"""Foresight against executors that see only now, on the same executor: seconds, waits, collectives, weights.

*Foresight* counts the routes of a step, publishes weights, plans with two redundant slots and compiles the schedule,
all on the clock; then weights travel a cell ahead. Its baselines (`harness.online_execution`) know a cell when its
counts are there: `online_eplb` with two slots, `online_exact` as MoonEP fills ranks, with as many slots as home
experts, and `online_ours`, the planner of foresight with two slots. Routes, model, transfers and slots kept for each
layer are the same; `online_exact_pool` has one pool of slots for all layers instead, as MoonEP has.

Seconds are those of two processes with a core each, where expert GEMMs dominate, of the same sequences in micro-steps
of 1, 4 and 16, and of smaller steps across two nodes; backward passes compute activations anew. On a processor a wait
of the host costs nothing by itself. What is counted is of small models on 2, 4 and 8 processes. All that can levels
ranks exactly there, and `foresight_same_slots` has as many slots as MoonEP's way, so that both balance alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.harness import node_lab
from benchmarks.harness.execution_bench import LINKS, SIZES, SLOTS, Bench, in_processes
from benchmarks.harness.executor_counts import busiest, fetched_bytes, posting, waits_per_layer
from benchmarks.harness.node_lab import NodeLab
from benchmarks.harness.node_steps import SIZES as SMALL
from benchmarks.harness.online_execution import executing_online
from benchmarks.harness.online_plans import BASELINES
from benchmarks.harness.pairs import PairedRatio, seconds_in_turn
from benchmarks.harness.step_prediction import PASSES
from benchmarks.harness.step_seconds import PLANNED, SKEWS, STATIC, recomputing_model
from benchmarks.harness.step_seconds import SIZES as LARGE
from foreroute import planner
from foreroute.ep import PlanExecution
from foreroute.plan import PlanOptions, Topology
from foreroute.plan.capabilities import FetchPath

COUNTED = SIZES | {"num_hidden_layers": 4}
COUNTED_MICRO_STEPS = 8
TIMED_BASELINES = ("online_eplb", "online_exact", "online_ours")
"""With two layers, one pool of slots is as good as a set for each."""
SEQUENCES, IN_ALL, TOKENS = (1, 4, 16), 16, 256
"""Of a micro-step on a rank; of the step on it; in each."""
ROUNDS = 12
NODE_BYTES_PER_S, NODE_TOKENS = 60e6, 64
"""Of a link between nodes; of a sequence there."""
EXACT = PlanOptions(tolerance=0.0)
Executing = Callable[[Bench], AbstractContextManager[PlanExecution]]


def run(*, quick: bool) -> dict[str, Any]:
    """The figures of rank 0."""
    sizes, micro_steps = ((2,), 2) if quick else ((2, 4, 8), COUNTED_MICRO_STEPS)
    by_ranks = {str(num_ranks): in_processes(counted, num_ranks, micro_steps) for num_ranks in sizes}
    all_executed = [one["executed_over_planned"] for found in by_ranks.values() for one in found.values()]
    seconds = None
    if len(os.sched_getaffinity(0)) > 1:
        seconds = in_processes(_pinned, 2, *((2, TOKENS // 16) if quick else (ROUNDS, TOKENS)))
    return {
        "metrics": {
            "waits_per_layer": in_processes(_waits, 1),
            "executed_over_planned": max(all_executed, key=lambda ratio: abs(ratio - 1)),
            "by_ranks": by_ranks,
            "weight_bytes_over_exact": {num_ranks: _over_exact(found) for num_ranks, found in by_ranks.items()},
            "seconds": seconds,
            "seconds_across_nodes": None if quick else _across_nodes(),
        },
        "baselines": {},
        "setting": {"sizes": LARGE, "tokens": TOKENS, "in_all": IN_ALL, "rounds": ROUNDS, "counted": COUNTED},
    }


def measured(
    rank: int,
    num_ranks: int,
    rounds: int,
    tokens: int = TOKENS,
    ranks_per_node: int | None = None,
    paths: FetchPath = "host",
    sizes: Mapping[str, Any] = LARGE,
) -> dict[str, Any]:
    """Seconds of foresight over those of each baseline, by sequences of a micro-step and pass, wherever ranks are.

    Args:
        rank: of the default group, all of whose ranks call it.
        num_ranks: of that group.
        rounds: in which all take their turns, two at least.
        tokens: of a sequence.
        ranks_per_node: all of them by default.
        paths: by which weights travel.
        sizes: of the model.
    """
    routed = recomputing_model(sizes, paths)
    found: dict[str, Any] = {}
    with closing(routed):
        for sequences in SEQUENCES:
            shape, micro_steps = (sequences, tokens), IN_ALL // sequences
            bench = Bench.routed_anew(routed, rank, skew=SKEWS["middle"], shape=shape, micro_steps=micro_steps)
            topology = replace(bench.topology, ranks_per_node=ranks_per_node or num_ranks)
            imbalance = bench.plan(STATIC).max_load_ML.sum() / bench.counts_MLGE.sum() * num_ranks
            of_shape: dict[str, Any] = {"static_imbalance": round(float(imbalance), 3)}
            for pass_name, updating in PASSES.items():
                works = {
                    name: partial(_step, bench, executing, updating)
                    for name, executing in _methods(topology, PLANNED, TIMED_BASELINES).items()
                }
                seconds = seconds_in_turn(works, rounds=rounds)
                foresight = seconds.pop("foresight")
                ratios = {baseline: PairedRatio.of(foresight, of_baseline) for baseline, of_baseline in seconds.items()}
                of_shape[pass_name] = {
                    f"foresight_over_{baseline}": ratio.shown() for baseline, ratio in ratios.items()
                }
                of_shape[pass_name]["foresight_s"] = round(median(foresight), 4)
            found[str(sequences)] = of_shape
    return found


def _across_nodes() -> dict[str, Any]:
    """`measured` of small steps on two nodes that this machine makes of itself, with weights from peer to peer."""
    if reason := node_lab.reason_against():
        return {"skipped": reason}
    with NodeLab(2, NODE_BYTES_PER_S) as lab:
        found: dict[str, Any] = lab.run(measured, ranks_per_node=1, args=(ROUNDS, NODE_TOKENS, 1, "direct", SMALL))
    return found


def _over_exact(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Bytes of weights that foresight moves over those of MoonEP's way, with slots kept for each layer, or a pool."""
    return {
        f"{pass_name}{suffix}": round(found["foresight_same_slots"][key] / found[f"online_exact{suffix}"][key], 4)
        for pass_name, key in ((pass_name, f"weights_{pass_name}") for pass_name in PASSES)
        for suffix in ("", "_pool")
    }


def _pinned(rank: int, num_ranks: int, rounds: int, tokens: int) -> dict[str, Any]:
    """`measured` with a core for each rank."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    return measured(rank, num_ranks, rounds, tokens)


def counted(rank: int, num_ranks: int, micro_steps: int) -> dict[str, dict[str, float]]:
    """By method: balance, and what travels in a cell, by count.

    Of a cell on average: `replicas`; `weights_<stage>`, how many experts' weights arrive, by their bytes; and
    `collectives_<stage>`, of rows and counts. An update has forward, recomputation and backward.
    """
    routed = recomputing_model(COUNTED, "direct")
    bench = Bench.routed_anew(routed, rank, micro_steps=micro_steps)
    mean, num_cells = bench.counts_MLGE.sum() / num_ranks, bench.counts_MLGE[..., 0, 0].size
    one_bytes = bench.expert_bytes
    methods = _methods(bench.topology, EXACT, list(BASELINES))
    many = replace(bench.topology, redundant_slots=COUNTED["num_experts"] // num_ranks)
    methods["foresight_same_slots"] = partial(_foresight, topology=many, options=EXACT)
    found: dict[str, dict[str, float]] = {}
    with closing(routed):
        for name, executing in methods.items():
            found[name] = {}
            for pass_name, updating in PASSES.items():
                Bench.number += 1
                with posting([]) as posted, executing(bench) as execution:
                    begun = len(posted.order)
                    bench.run(updating=updating)
                    during = posted.order[begun:]
                moved = fetched_bytes(execution)
                found[name][f"weights_{pass_name}"] = round(moved / one_bytes / num_cells, 4)
                found[name][f"collectives_{pass_name}"] = (during.count("rows") + during.count("counts")) / num_cells
            plan, most = execution.plan, busiest(execution.executed_ML)
            planned = sum(
                int(plan.cell(m, layer).loads_G(bench.counts_MLGE[m, layer]).max())
                for m, layer in np.ndindex(*plan.shape[:2])
            )
            found[name]["executed_over_planned"] = most / planned
            found[name]["busiest_over_mean"] = round(most / mean, 4)
            found[name]["replicas"] = float(plan.num_replicas_ML.mean())
    return found


def _waits(rank: int, num_ranks: int) -> dict[str, float]:
    """Waits of the host that a routed layer adds to a micro-step, by method."""
    methods = _methods(Topology(num_ranks, num_ranks, SLOTS, LINKS), PLANNED, TIMED_BASELINES)
    return {name: waits_per_layer(rank, num_ranks, executing) for name, executing in methods.items()}


def _methods(topology: Topology, options: PlanOptions, baselines: Sequence[str]) -> dict[str, Executing]:
    """By name, with the options of foresight's plan."""
    methods: dict[str, Executing] = {"foresight": partial(_foresight, topology=topology, options=options)}
    return methods | {
        name: partial(executing_online, baseline=BASELINES[name], topology=topology) for name in baselines
    }


@contextmanager
def _foresight(bench: Bench, topology: Topology, options: PlanOptions) -> Iterator[PlanExecution]:
    for rows in bench.rows_M:
        rows._counts.clear()  # so that they are counted on the clock
    counts_MLGE = bench.routed.gather_counts(bench.rows_M)
    plan = planner.plan(counts_MLGE, topology, options, home_LE=bench.routed.home_LE)
    with bench.routed.execute(plan, counts_MLGE, bench.rows_M, step=Bench.number) as execution:
        yield execution


def _step(bench: Bench, executing: Executing, updating: bool) -> None:
    """All that a step takes."""
    Bench.number += 1
    with executing(bench):
        bench.run(updating=updating)
    dist.barrier()
