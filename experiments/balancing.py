"""Balancers on steps and micro-steps: loads and transfers that are counted, and seconds that are modelled.

Eight ranks of one node with two redundant slots each, and contiguous homes. `llep_free` is LLEP with a slot for every
expert, as its public code has it. `eplb_last` is EPLB placed anew for every micro-step by the loads of the one before.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.balancers import OTHER_BALANCERS, baselines
from experiments.unevenness import BASE_RANKS, SEQUENCES, Ints, Steps, dealt, drawn, sequence_counts
from foreroute.plan import PlanOptions, StepPlan, save_counts
from foreroute.planner import plan
from foreroute.simulate import parse_config, simulate
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.compare import compare, figures_of
from foreroute.simulate.records import MethodRecord
from foreroute.trace import RoutingTrace

OLMOE = {
    "num_layers": 16,
    "num_experts": 64,
    "top_k": 8,
    "hidden": 2048,
    "intermediate": 1024,
    "attention_width": 2048,
    "dense_parameters": 4 * 2048 * 2048,
    "vocabulary": 50304,
}
"""OLMoE-1B-7B, whose experts and picks are as many as those of the model that made the routes."""
SIMULATED = ("static", "eplb_previous", "eplb_micro_step", "foreroute")
"""Methods that are simulated; LLEP stands beside them."""
TOKENS = 8192
"""Of a rank in a simulated micro-step."""


def balancing_of(traces: Sequence[RoutingTrace], kind_S: Ints, seed: int) -> dict[str, Any]:
    """Measure balancers on the traces of steps that follow each other, and on what is drawn in their place.

    Sequences, whose kinds are the same in all steps, are dealt to micro-steps at random, and kind after kind.
    """
    counts_TSLE = [sequence_counts(trace) for trace in traces]
    few, many = SEQUENCES[0], SEQUENCES[-1]
    steps = {n: dealt(counts_TSLE, kind_S, "mixed", BASE_RANKS, n, seed) for n in SEQUENCES}
    one_kind = {n: dealt(counts_TSLE, kind_S, "sorted", BASE_RANKS, n, seed) for n in (few, many)}
    made = {n: drawn(traces, n, seed) for n in (few, many)}
    return {
        "balanced": {f"{BASE_RANKS}x{n}": balanced(each) for n, each in steps.items()},
        "sorted_balanced": {f"{BASE_RANKS}x{n}": balanced(each) for n, each in one_kind.items()},
        "workload_balanced": {f"{BASE_RANKS}x{n}": balanced(each) for n, each in made.items()},
        "simulated": _simulated(steps[many][-2], steps[many][-1]),
        "workload_simulated": _simulated(made[many][-2], made[many][-1]),
    }


def balanced(steps: Steps) -> dict[str, dict[str, float]]:
    """Average imbalance of a cell and experts moved for one, by method, over all steps but the first."""
    values = {"cluster": {"gpus": BASE_RANKS, "expert_parallel": BASE_RANKS}, "model": OLMOE}
    cluster = parse_config(values, source="the experiments").described()
    records: dict[str, list[MethodRecord]] = {}
    for before, counts in pairwise(steps):
        home_LE = cluster.topology.contiguous_home_LE(*counts.shape[1::2])
        problem = BalancerInput(counts, cluster.topology, home_LE, before.sum(axis=(0, 2), dtype=np.int64))
        found = list(compare(problem, cluster.costs, baselines(before)))
        # a slot for every expert that a rank does not own: no limit at all
        free = replace(cluster.topology, redundant_slots=counts.shape[3] - counts.shape[3] // BASE_RANKS)
        free_llep = {"llep_free": OTHER_BALANCERS["llep"]}
        found += compare(replace(problem, topology=free), cluster.costs, free_llep)
        exact: StepPlan = plan(counts, cluster.topology, PlanOptions(tolerance=0.0), home_LE=home_LE)
        found.append(figures_of(exact, problem, cluster.costs, label="foreroute_exact", planning_s=0.0))
        for record in found:
            records.setdefault(record.name, []).append(record)
    return {
        name: {
            "imbalance": _rounded([record.imbalance for record in several]),
            "fetches": _rounded([record.fetches_per_cell for record in several]),
        }
        for name, several in records.items()
    }


def _simulated(before: NDArray[np.integer], counts: NDArray[np.integer]) -> dict[str, float]:
    """Give modelled seconds of homes alone over those of a method, H100 in nodes of 8; `before` is the step before."""
    num_ranks = counts.shape[2]
    values: dict[str, Any] = {"cluster": {"gpus": num_ranks, "expert_parallel": num_ranks}, "model": OLMOE}
    # recorded steps are small; the model's costs per byte and row need real sizes to weigh against
    factor = max(1, round(TOKENS * OLMOE["top_k"] / (counts.sum(axis=(2, 3)).mean() / num_ranks)))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.safetensors" for number in range(2)]
        for path, each in zip(paths, (before, counts), strict=True):
            save_counts(each * factor, path)
        values |= {"workload": {"previous_counts": str(paths[0]), "counts": str(paths[1])}, "methods": SIMULATED}
        config = parse_config(values, source="the experiments")
        found = simulate(config, balancers={"llep": OTHER_BALANCERS["llep"]})
    static_s = found["static"].training_s
    gains = {record.name: static_s / record.training_s for record in found.methods}
    gains["forced_balance"] = static_s / found.forced_balance_s
    return {name: float(f"{gain:.4g}") for name, gain in gains.items()}


def _rounded(values: Sequence[float]) -> float:
    return float(f"{np.mean(values):.5g}")
