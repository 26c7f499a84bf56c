"""The planner against EPLB planned anew in every cell, and against itself without replicas for traffic."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.balancers import OTHER_BALANCERS
from benchmarks.harness.eplb_published import published_placement
from benchmarks.harness.pairs import quickest
from foreroute.costs.model import CostModel
from foreroute.plan import PlanOptions, StepPlan, Topology, save_counts
from foreroute.planner import plan
from foreroute.simulate import parse_config, simulate
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.compare import compare, figures_of
from foreroute.simulate.eplb import eplb_micro_step
from foreroute.simulate.records import MethodRecord
from foreroute.simulate.workload import WORKLOADS

PUBLISHED_CELLS = 4
TOKENS = {"8k": 8192, "2k": 2048}
SIMULATED_TOKENS = 8192
"""Of a rank in a simulated micro-step."""
SIMULATED = ("static", "eplb_previous", "eplb_micro_step", "ours")


def eplb(
    counts: NDArray[np.int32],
    topology: Topology,
    home_LE: NDArray[np.int16],
    ours: Mapping[str, float],
    repeats: int,
) -> dict[str, float]:
    """Ours exact, slots kept per layer, against EPLB per micro-step with as many slots, which may re-home every expert.

    Args:
        counts: int32 [M, L, G, E].
        topology: ranks and slots.
        home_LE: where experts are when the step begins, for ours; EPLB begins with the contiguous homes.
        ours: figures of ours in exact mode, of which microseconds per cell are read: those of the quickest of `repeats`
            runs. So are those of EPLB.
        repeats: of runs.
    """
    found = plan(counts, topology, PlanOptions(tolerance=0.0), home_LE=home_LE)
    cells = counts.shape[0] * counts.shape[1]
    contiguous_LE = np.tile(topology.contiguous_home_E(counts.shape[3]), (counts.shape[1], 1))
    problem = BalancerInput(counts, topology, contiguous_LE)
    theirs = list(eplb_micro_step(problem))
    fast_us = quickest(lambda: list(eplb_micro_step(problem)), repeats) * 1e6 / cells
    pairs = zip(found.max_load_ML.ravel(), theirs, problem.cells(), strict=True)
    worse = sum(most > int(other.loads_G(counts_GE).max()) for most, other, (_, counts_GE) in pairs)
    moves = sum(int(other.fetched_R.sum()) for other in theirs)
    ours_moves = int(found.hosts.fetched_R.sum()) + int((home_LE != contiguous_LE).sum())
    published_us = _published_us(counts, topology)
    return {
        "cells_worse_balanced": int(worse),
        "cells": cells,
        "moves_ratio": round(ours_moves / moves, 4),
        "published_torch_us_per_cell": round(published_us, 1),
        "published_torch_over_ours": round(published_us / ours["us_per_cell"], 1),
        "published_torch_over_ours_persistent": round(published_us / ours["persistent_us_per_cell"], 1),
        "own_numba_eplb_us_per_cell": round(fast_us, 1),
        "own_numba_eplb_over_ours": round(fast_us / ours["us_per_cell"], 2),
        "own_numba_eplb_over_ours_persistent": round(fast_us / ours["persistent_us_per_cell"], 2),
    }


def _published_us(counts: NDArray[np.int32], topology: Topology) -> float:
    """Time placing alone, without a token split; the best of some cells."""
    num_experts, num_ranks = counts.shape[3], topology.num_ranks
    copies = num_experts + num_ranks * topology.redundant_slots
    weights = [torch.tensor(counts[m, :1].sum(axis=1)) for m in range(PUBLISHED_CELLS)]
    placing = [partial(published_placement, weight, copies, 1, 1, num_ranks) for weight in weights]
    return min(quickest(place, 1) for place in placing) * 1e6


def traffic(name: str, costs: CostModel, *, quick: bool) -> dict[str, float]:
    """Replicas against traffic in 8 slots over load balancing alone in 2, empty slots; even sources.

    Beside it, likewise over ours with 2 slots: the LAER-style balancer, which lays all experts anew in every cell with
    traffic in view, with as many slots.
    """
    figures = {}
    for label, tokens in TOKENS.items():
        workload = replace(WORKLOADS[name], num_micro_steps=2 if quick else 16, num_layers=2)
        counts = workload.of_tokens(tokens).draw(seed=1).counts()
        priced = replace(costs, sequence_tokens=min(4096.0, float(tokens)))
        balanced, _ = _planned(counts, PlanOptions(slots="shared", traffic=False, pay_off=False), 2, priced)
        short, us = _planned(counts, PlanOptions(slots="shared", traffic=True, pay_off=False), 8, priced)
        seconds = [figures_of(one, counts, priced, label="", planning_s=0.0).training_s for one in (balanced, short)]
        problem = BalancerInput(counts, short.topology, short.home_LE)
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


def simulated(
    before: NDArray[np.integer],
    counts: NDArray[np.integer],
    model: Mapping[str, Any],
    methods: tuple[str, ...] = SIMULATED,
) -> dict[str, float]:
    """Modelled seconds of recompute and update without balancing over those of a method, on H100 in nodes of 8.

    Args:
        before: counts_MLGE of the step before.
        counts: of the step, multiplied to have about `SIMULATED_TOKENS`.
        model: the table of a configuration, of as many experts and picks.
        methods: of the simulator; LLEP stands beside them.
    """
    num_ranks = counts.shape[2]
    values: dict[str, Any] = {"cluster": {"gpus": num_ranks, "expert_parallel": num_ranks}, "model": dict(model)}
    top_k = parse_config(values, source="the benchmark").described().costs.model.top_k
    # recorded steps are small; the model's costs per byte and row need real sizes to weigh against
    factor = max(1, round(SIMULATED_TOKENS * top_k / (counts.sum(axis=(2, 3)).mean() / num_ranks)))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.safetensors" for number in range(2)]
        for path, each in zip(paths, (before, counts), strict=True):
            save_counts(each * factor, path)
        values |= {"workload": {"previous_counts": str(paths[0]), "counts": str(paths[1])}, "methods": methods}
        config = parse_config(values, source="the benchmark")
        found = simulate(config, balancers={"llep": OTHER_BALANCERS["llep"]})
    static_s = found["static"].training_s
    gains = {record.name: static_s / record.training_s for record in found.methods}
    gains["forced_balance"] = static_s / found.forced_balance_s
    return {name: float(f"{gain:.4g}") for name, gain in gains.items()}


def imbalance(record: MethodRecord) -> tuple[float, float, float]:
    """Mean, 99th percentile and worst over cells."""
    return record.imbalance, record.imbalance_99, record.imbalance_worst


def shown(record: MethodRecord, cells: int) -> dict[str, float]:
    """Balance, experts moved for a cell, modelled seconds of the step, and processor time of planning a cell."""
    mean, p99, worst = imbalance(record)
    return {
        "mean": round(mean, 5),
        "p99": round(p99, 5),
        "worst": round(worst, 5),
        "moves": round(record.fetches_per_cell, 2),
        "cross_node_share": round(record.cross_node_share, 4),
        "seconds": round(record.training_s, 4),
        "us_per_cell": round(record.planning_s / cells * 1e6, 1),
    }
