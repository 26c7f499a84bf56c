"""The simulator against the real executor: steps on 2 and 4 gloo processes, predicted with costs fitted to other steps.

On each number of processes, plans that differ in skew, tokens and replicas run in turn, round after round: the forward
passes of all micro-steps (recompute), and forward with backward under activation checkpointing (update). The time of a
plan is that of the slowest rank in the quickest round. Costs (of a FLOP, of a byte of weights and rows in memory, of a
byte between ranks, of a layer at any rate) are fitted to two thirds of the plans and predict the others, three times:
every prediction is of a plan that the fit has not seen. Ranks that share processors take turns in the model as here.
"""

from __future__ import annotations

import itertools
import os
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.execution_bench import BATCH, SIZES, SLOTS, Bench, in_processes
from foreroute.ep import BatchRows
from foreroute.ep.transfer.engine import TransferEngine
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.plan import PlanOptions, StepPlan, Topology
from foreroute.simulate import SimulateConfig, parse_config
from foreroute.simulate.fit import fit, fit_record, rank_correlation
from foreroute.simulate.measurements import Measurement

SKEWS = (0.0, 1.0)
SEQUENCES = (1, 2, 4, 8)
OPTIONS = {"home": PlanOptions(replicas=False), "ours": PlanOptions(slots="shared")}
FITTED = ("gemm_flops_per_s", "memory_bytes_per_s", "layer_s", "node_bytes_per_s")
FOLDS = 3
"""Coprime to the two ways of serving a step, so that every fold has both."""
STAGES = ("recompute", "update")
HEAD_WIDTH = 64


class Timed(NamedTuple):
    """One plan, and its seconds by stage."""

    name: str
    counts: Any
    plan: StepPlan
    seconds: dict[str, float]


def run(*, quick: bool) -> dict[str, Any]:
    """Errors of predictions by number of processes and stage; quick, of two processes in a single round."""
    rounds, sizes = (1, (2,)) if quick else (12, (2, 4))
    metrics = {str(num_ranks): _figures(in_processes(_timed, num_ranks, rounds), num_ranks) for num_ranks in sizes}
    return {
        "metrics": metrics,
        "baselines": {},
        "setting": {"rounds": rounds, "sizes": SIZES, "load_average": [round(one, 1) for one in os.getloadavg()]},
    }


def _figures(timed: list[Timed], num_ranks: int) -> dict[str, Any]:
    config = _config(num_ranks)
    figures: dict[str, Any] = {"plans": len(timed)}
    for stage in STAGES:
        measured = [_measured(one, stage) for one in timed]
        found: list[tuple[Measurement, float]] = []
        for fold in range(FOLDS):
            unseen = measured[fold::FOLDS]
            fitted = fit([one for one in measured if one not in unseen], config, FITTED)
            costs = replace(config.described().costs, hardware=fitted.hardware)
            found += list(zip(unseen, fit_record(unseen, config, costs, FITTED).predicted_s, strict=True))
        seconds = np.array([one.seconds for one, _ in found])
        predicted = np.array([value for _, value in found])
        correlation = rank_correlation(seconds, predicted)
        figures[stage] = {
            "median_error": round(float(np.median(np.abs(predicted / seconds - 1))), 4),
            "worst_error": round(float(np.abs(predicted / seconds - 1).max()), 4),
            "rank_correlation": correlation and round(correlation, 4),
            "measured_and_predicted_s": {one.name: [round(one.seconds, 4), round(value, 4)] for one, value in found},
        }
    return figures


def _config(num_ranks: int) -> SimulateConfig:
    """These processes, with rates to begin from."""
    hidden, heads, kv_heads = SIZES["hidden_size"], SIZES["num_attention_heads"], SIZES["num_key_value_heads"]
    return parse_config(
        {
            "cluster": {
                "gpus": num_ranks,
                "expert_parallel": num_ranks,
                "redundant_slots": SLOTS,
                "processors_per_node": min(num_ranks, os.cpu_count() or 1),
            },
            "model": {
                "num_layers": SIZES["num_hidden_layers"],
                "num_experts": SIZES["num_experts"],
                "top_k": SIZES["num_experts_per_tok"],
                "hidden": hidden,
                "intermediate": SIZES["moe_intermediate_size"],
                "dense_parameters": 2 * hidden * HEAD_WIDTH * (heads + kv_heads),
                "attention_width": heads * HEAD_WIDTH,
                "vocabulary": SIZES["vocab_size"],
                "weight_bytes": 4.0,
                "activation_bytes": 4.0,
            },
            "hardware": {
                "gemm_flops_per_s": 2e10,
                "attention_flops_per_s": 2e10,
                "memory_bytes_per_s": 5e9,
                "ranks_per_node": num_ranks,
                "tile_rows": 1,
                "layer_s": 5e-3,
            },
            "links": {
                "node_bytes_per_s": 5e8,
                "cluster_bytes_per_s": 5e8,
                "host_bytes_per_s": 5e9,
                "node_latency_s": 1e-4,
                "cluster_latency_s": 1e-4,
            },
            "costs": {"dispatcher": "copies", "sequence_tokens": 64.0},
        },
        source="the benchmark",
    )


def _measured(one: Timed, stage: str) -> Measurement:
    num_ranks = one.counts.shape[2]
    topology = Topology(num_ranks, num_ranks, SLOTS, one.plan.topology.links)
    return Measurement.of(one.name, one.counts, one.plan, topology, stage, one.seconds[stage])


def _timed(rank: int, num_ranks: int, rounds: int) -> list[Timed]:
    bench = Bench.of(rank, num_ranks)
    model: Any = bench.routed.model
    model.activation_checkpointing_enable()
    with closing(bench.engine(PeerGroup(timeout_s=120), slots="shared", paths="host")) as engine:
        bench.placed.use(engine)
        again = partial(Bench.routed_anew, bench.routed, bench.placed, rank, num_ranks)
        steps = [
            (again(skew=skew, shape=(sequences, BATCH[1])), f"skew {skew}, {sequences} sequences")
            for skew, sequences in itertools.product(SKEWS, SEQUENCES)
        ]
        planned = [
            (step, step.plan(options), f"{name}, {how}") for step, name in steps for how, options in OPTIONS.items()
        ]
        seconds: list[dict[str, list[float]]] = [{stage: [] for stage in STAGES} for _ in planned]
        for turn in range(rounds + 1):
            for (step, plan, _), times in zip(planned, seconds, strict=True):
                for stage in STAGES:
                    taken = _seconds_of(step, plan, engine, updating=stage == "update")
                    if turn > 0:
                        times[stage].append(taken)
    return [
        Timed(name, step.counts_MLGE, plan, {stage: min(times[stage]) for stage in STAGES})
        for (step, plan, name), times in zip(planned, seconds, strict=True)
    ]


def _seconds_of(bench: Bench, plan: StepPlan, engine: TransferEngine, *, updating: bool) -> float:
    """Of the slowest rank."""
    engine.publish()
    bench.placed.begin_step(0, plan, bench.counts_MLGE, updating=updating)
    dist.barrier()
    begun = time.perf_counter()
    for m, (batch, trace) in enumerate(zip(bench.batches, bench.traces, strict=True)):
        rows = BatchRows.replayed(trace, batch)
        with (
            torch.set_grad_enabled(updating),
            bench.routed.replay(trace),
            bench.placed.executing(m, rows),
        ):
            logits = bench.routed.model(input_ids=batch, use_cache=False).logits
            if updating:
                logits.log_softmax(-1)[..., 0].mean().backward()
    taken = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    bench.routed.model.zero_grad(set_to_none=True)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()
