"""The planner on the calibrated workloads: balance, replicas, transfers, time, and what other balancers reach.

Cells G8 to G64 have 128 experts on so many ranks, in nodes of 8; E256 has 256 on 64. A step is 32 micro-steps of 48
layers (`--quick`: of 4). Modes: `exact_r1` and `exact_r2` balance exactly with one or two redundant slots per rank,
`eps02_r2` stops at 1.02 times the mean; each with contiguous homes and with homes relocated without a limit. Figures
are of slots that are empty at every cell, those named `persistent` of slots that every layer keeps.

Times of planning are processor time of one thread, the best of several, from counts to token splits, homes given; but
for `step_ms`, which the clock took.
Seconds of the step are modelled (Qwen3-30B-A3B on H100, deduplicated dispatch): no GPU is measured here.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.balancers import OTHER_BALANCERS
from benchmarks.harness import planner_oracles
from benchmarks.harness.pairs import quickest, seconds_in_turn
from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.costs.pricing import least_seconds
from foreroute.plan import PlanOptions, StepPlan, Topology
from foreroute.planner import plan
from foreroute.planner.homes import place_homes
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.compare import compare, figures_of
from foreroute.simulate.eplb import eplb_micro_step
from foreroute.simulate.methods import BALANCERS
from foreroute.simulate.records import MethodRecord
from foreroute.simulate.workload import WORKLOADS

CELLS = ("G8", "G16", "G32", "G64", "E256")
MODES = {"exact_r1": (0.0, 1), "exact_r2": (0.0, 2), "eps02_r2": (0.02, 2)}
STEP_LAYERS, SEED = 48, 0
TOKENS = {"8k": 8192, "2k": 2048}
"""Of a rank in a micro-step, where replicas serve traffic."""

Ints = NDArray[np.int32]


def run(quick: bool) -> dict[str, Any]:
    """Figures by cell; in `baselines` the other balancers with two slots, contiguous homes, and the bound."""
    layers, repeats, sampled = (4, 3, 2) if quick else (STEP_LAYERS, 5, 16)
    metrics, baselines = {}, {}
    for name in CELLS:
        workload = replace(WORKLOADS[name], num_layers=layers)
        counts, before = (workload.draw(seed=SEED, step=step).counts() for step in (1, 0))
        costs = costs_of(workload.num_experts)
        figures, others = _cell(counts, before.sum(axis=(0, 2), dtype=np.int64), costs, repeats, sampled)
        figures["traffic_r8"] = _traffic(name, costs, quick=quick)
        metrics[name], baselines[name] = figures, others
    return {"metrics": {"layers": layers, **metrics}, "baselines": baselines}


def costs_of(num_experts: int) -> CostModel:
    """Qwen3-30B-A3B with so many experts."""
    model = replace(MODELS["qwen3-30b-a3b"], num_experts=num_experts)
    return CostModel(model=model, hardware=HARDWARE["h100"], dispatcher="dedup", paths="host")


def _cell(
    counts: Ints, previous_LE: NDArray[np.int64], costs: CostModel, repeats: int, sampled: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    topology = costs.hardware.topology(counts.shape[2], 2)
    contiguous = topology.contiguous_home_LE(*counts.shape[1::2])
    homes = {"contiguous": contiguous, "relocated": place_homes(counts, topology, contiguous)}
    figures: dict[str, Any] = {}
    for mode, (tolerance, slots) in MODES.items():
        there = replace(topology, redundant_slots=slots)
        figures[mode] = {
            home: _mode(counts, there, home_LE, tolerance, costs, repeats, sampled) for home, home_LE in homes.items()
        }
    figures["step_ms"] = _by_threads(counts, topology, repeats)
    problem = BalancerInput(counts, topology, contiguous, previous_LE)
    others: dict[str, Any] = {
        record.name: _shown(record, counts.shape[0] * counts.shape[1])
        for record in compare(problem, costs, BALANCERS | OTHER_BALANCERS)
    }
    others["least_seconds"] = round(float(least_seconds(counts, topology, costs).sum()), 4)
    figures["static"] = others["static"]
    figures["against_eplb"] = {
        home: _against_eplb(counts, topology, home_LE, figures["exact_r2"][home], repeats)
        for home, home_LE in homes.items()
    }
    return figures, others


def _by_threads(counts: Ints, topology: Topology, repeats: int) -> dict[str, float]:
    """Measure milliseconds of the clock of planning a step by the defaults, on one thread and on all cores."""
    threads = {"1 thread": 1, "all cores": len(os.sched_getaffinity(0))}
    works = {name: partial(plan, counts, topology, PlanOptions(threads=number)) for name, number in threads.items()}
    taken = seconds_in_turn(works, rounds=repeats)
    return {name: round(statistics.median(seconds) * 1e3, 2) for name, seconds in taken.items()}


def _mode(
    counts: Ints,
    topology: Topology,
    home_LE: NDArray[np.int16],
    tolerance: float,
    costs: CostModel,
    repeats: int,
    sampled: int,
) -> dict[str, float]:
    cells, step = counts.shape[0] * counts.shape[1], BalancerInput(counts, topology, home_LE)
    found: dict[str, StepPlan] = {}
    records: dict[str, MethodRecord] = {}
    us: dict[str, float] = {}
    for slots in ("shared", "layer"):
        options = PlanOptions(tolerance=tolerance, slots=slots)

        def planned(options: PlanOptions = options) -> StepPlan:
            return plan(counts, topology, options, home_LE=home_LE)

        found[slots] = planned()
        us[slots] = quickest(planned, repeats) * 1e6 / cells
        records[slots] = figures_of(found[slots], step, costs, label=slots, planning_s=us[slots] * cells / 1e6)
    empty, kept = records["shared"], records["layer"]
    figures = {
        "mean": empty.imbalance,
        "worst": empty.imbalance_worst,
        "replicas": empty.fetches_per_cell,
        "us_per_cell": us["shared"],
        "persistent_worst": kept.imbalance_worst,
        "transfers_persistent": kept.fetches_per_cell,
        "persistent_us_per_cell": us["layer"],
        "persistent_seconds": kept.training_s,
    }
    if tolerance == 0:
        gap_ML = found["shared"].max_load_ML / np.maximum(planner_oracles.best_split(counts, found["shared"]), 1) - 1
        figures |= {"split_gap_mean": float(gap_ML.mean()), "split_gap_worst": float(gap_ML.max())}
    elif topology.num_nodes > 1:
        for slots, name in (("shared", "cross_node_gap"), ("layer", "persistent_cross_node_gap")):
            figures[name] = planner_oracles.cross_node_gap(found[slots], counts, tolerance, sampled)
    return {name: round(value, 5) for name, value in figures.items()}


def _shown(record: MethodRecord, cells: int) -> dict[str, float]:
    """Balance, experts moved for a cell, modelled seconds of the step, and processor time of planning a cell."""
    return {
        "mean": round(record.imbalance, 5),
        "moves": round(record.fetches_per_cell, 2),
        "seconds": round(record.training_s, 4),
        "us_per_cell": round(record.planning_s / cells * 1e6, 1),
    }


def _against_eplb(
    counts: NDArray[np.int32], topology: Topology, home_LE: NDArray[np.int16], exact: Mapping[str, float], repeats: int
) -> dict[str, float]:
    """Set exact plans, slots kept per layer, beside EPLB per micro-step with as many slots, which may move all homes.

    EPLB begins with contiguous homes. Times, `exact` among them, are of the quickest of `repeats` runs.
    """
    found = plan(counts, topology, PlanOptions(tolerance=0.0), home_LE=home_LE)
    cells = counts.shape[0] * counts.shape[1]
    contiguous_LE = topology.contiguous_home_LE(*counts.shape[1::2])
    problem = BalancerInput(counts, topology, contiguous_LE)
    eplb = list(eplb_micro_step(problem))
    fast_us = quickest(lambda: list(eplb_micro_step(problem)), repeats) * 1e6 / cells
    pairs = zip(found.max_load_ML.ravel(), eplb, problem.cells(), strict=True)
    worse = sum(most > int(other.loads_G(counts_GE).max()) for most, other, (_, counts_GE) in pairs)
    moves = sum(int(other.fetched_R.sum()) for other in eplb)
    plan_moves = int(found.hosts.fetched_R.sum()) + int((home_LE != contiguous_LE).sum())
    return {
        "cells_worse_balanced": int(worse),
        "cells": cells,
        "moves_ratio": round(plan_moves / moves, 4),
        "eplb_us_per_cell": round(fast_us, 1),
        "eplb_over_foreroute": round(fast_us / exact["us_per_cell"], 2),
        "eplb_over_foreroute_persistent": round(fast_us / exact["persistent_us_per_cell"], 2),
    }


def _traffic(name: str, costs: CostModel, *, quick: bool) -> dict[str, float]:
    """Replicas against traffic in 8 slots over load balancing alone in 2, empty slots; even sources.

    Beside it, likewise over plans with 2 slots: the LAER-style balancer, which lays all experts anew in every cell with
    traffic in view, with as many slots.
    """
    figures = {}
    for label, tokens in TOKENS.items():
        workload = replace(WORKLOADS[name], num_micro_steps=2 if quick else 16, num_layers=2)
        counts = workload.of_tokens(tokens).draw(seed=1).counts()
        priced = replace(costs, sequence_tokens=min(4096.0, float(tokens)))
        balanced, _ = _planned(counts, PlanOptions(slots="shared", traffic=False, pay_off=False), 2, priced)
        short, us = _planned(counts, PlanOptions(slots="shared", traffic=True, pay_off=False), 8, priced)
        problem = BalancerInput(counts, short.topology, short.home_LE)
        seconds = [figures_of(one, problem, priced, label="", planning_s=0.0).training_s for one in (balanced, short)]
        (laer,) = compare(problem, priced, {"laer": OTHER_BALANCERS["laer"]})
        suffix = "" if label == "8k" else f"_{label}"
        figures[f"time_gain{suffix}"] = round(seconds[0] / seconds[1], 4)
        figures[f"laer_time_gain{suffix}"] = round(seconds[0] / laer.training_s, 4)
        figures[f"us_per_cell{suffix}"] = round(us, 1)
    return figures


def _planned(counts: NDArray[np.int32], options: PlanOptions, slots: int, costs: CostModel) -> tuple[StepPlan, float]:
    """The plan, and processor microseconds per cell."""
    topology = costs.hardware.topology(counts.shape[2], slots)
    found = plan(counts, topology, options, costs=costs)
    seconds = quickest(lambda: plan(counts, topology, options, costs=costs), 2)
    return found, seconds * 1e6 / (counts.shape[0] * counts.shape[1])
