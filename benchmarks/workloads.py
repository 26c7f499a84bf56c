"""The planner and its baselines on workloads that others chose.

W0 to W7 are those of Megatron-LM's token-imbalance benchmark (`harness/token_imbalance.py`), in its own sizes and with
128 experts. A step is twelve micro-steps, a whole turn of the hot spot of W6, after a step of the twelve before.
Part H of `experiments` has balancers on routes that were really made.

Keys are `metrics.workloads.<workload>.<method>.<setting>`. `ours_r2` and `ours_r1` balance exactly, with two slots and
with one, which every layer keeps; those `relocated` also move homes before the step, without a limit. Baselines have
two.
`balance` counts the cells of ours by what proves that they are as level as can be:

    level    no rank has more than the mean, rounded up
    slots    no plan of these homes and slots has less: `bound_ML` of the plan, or `least_where_slots_lack`
    program  likewise, by an integer program over all replicas, of cells with eight experts
    missed   none of these: the program finds a better plan
    open     none of these, in a larger cell

`gap` is the worst distance from the largest of these bounds. `oracle` lists the checks of the benchmark's oracle that a
cell fails. Times are processor time of one thread; seconds of `simulated` are modelled (Qwen3-30B-A3B on H100).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.balancers import baselines
from benchmarks.harness.pairs import quickest
from benchmarks.harness.planner_against import SIMULATED, shown, simulated
from benchmarks.harness.planner_oracles import least_of_all_plans, least_where_slots_lack
from benchmarks.harness.token_imbalance import WORKLOADS, Setting, failed_checks, routes, sources, step_counts
from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.plan import PlanOptions, StepPlan, verify
from foreroute.planner import plan
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.compare import compare, figures_of

Ints = NDArray[np.int32]

SETTINGS = {
    "e8_k2_ep2": Setting(8, 2, 128, 2),
    "e8_k2_ep4": Setting(8, 2, 128, 4),
    "e8_k4_ep4": Setting(8, 4, 512, 4),
    "e128_k8_ep8": Setting(128, 8, 1024, 8),
    "e128_k8_ep64": Setting(128, 8, 1024, 64),
}
"""The first three are sizes of the pull request."""
QUICK = ("e8_k2_ep4", "e128_k8_ep8")
MICRO_STEPS, SEED = 12, 1234
SIMULATED_SETTING = "e128_k8_ep8"
OURS = {"ours_r2": (2, 0), "ours_r1": (1, 0), "ours_r2_relocated": (2, None), "ours_r1_relocated": (1, None)}
"""Slots, and home moves of a layer."""
PROGRAM_EXPERTS = 8


def run(quick: bool) -> dict[str, Any]:
    """Figures by workload, method and setting."""
    metrics: dict[str, dict[str, dict[str, Any]]] = {}
    repeats = 1 if quick else 5
    for workload in WORKLOADS:
        by_method = metrics.setdefault(workload, {})
        for setting in QUICK if quick else SETTINGS:
            size = SETTINGS[setting]
            before, counts = (
                step_counts(workload, size, range(first, first + MICRO_STEPS), SEED) for first in (0, MICRO_STEPS)
            )
            for method, figures in _figures(before, counts, size.top_k, repeats):
                by_method.setdefault(method, {})[setting] = figures
            by_method["ours_r2"][setting]["oracle"] = _oracle(workload, size, counts)
            if setting == SIMULATED_SETTING:
                model = {"preset": "qwen3-30b-a3b"}
                by_method["simulated"] = {setting: simulated(before, counts, model, (*SIMULATED, "ours_rehomed"))}
    return {"metrics": {"workloads": metrics}, "baselines": {}}


def _figures(before: Ints, counts: Ints, top_k: int, repeats: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure every method; give its name and figures."""
    num_layers, num_ranks, num_experts = counts.shape[1:]
    model = replace(MODELS["qwen3-30b-a3b"], num_experts=num_experts, top_k=top_k)
    costs = CostModel(model=model, hardware=HARDWARE["h100"], dispatcher="copies", paths="host")
    topology = costs.hardware.topology(num_ranks, 2)
    home_LE = np.tile(topology.contiguous_home_E(num_experts), (num_layers, 1))
    problem = BalancerInput(counts, topology, home_LE, before.sum(axis=(0, 2), dtype=np.int64))
    cells = counts.shape[0] * num_layers
    for record in compare(problem, costs, baselines(before)):
        yield record.name, shown(record, cells)
    for name, (slots, home_moves) in OURS.items():
        options, there = PlanOptions(tolerance=0.0, home_moves=home_moves), replace(topology, redundant_slots=slots)
        found = plan(counts, there, options)
        verify(found, counts, options)
        # homes are moved once in a step, and not in the time of a cell
        homed = replace(options, home_moves=0)
        seconds = quickest(lambda: plan(counts, there, homed, home_LE=found.home_LE), repeats)  # noqa: B023
        record = figures_of(found, counts, costs, label=name, planning_s=seconds)
        replicas = round(float(found.num_replicas_ML.mean()), 2)
        yield name, {**shown(record, cells), "replicas": replicas, **_certified(found, counts)}


def _certified(found: StepPlan, counts: Ints) -> dict[str, Any]:
    """Count cells by what proves that none is more level, and find the worst distance from what is proved."""
    (num_micro_steps, num_layers, num_experts), ranks = found.shape, found.topology.num_ranks
    proofs: Counter[str] = Counter(level=0, slots=0, program=0, missed=0, open=0)
    gap, bounds = 0.0, []
    for m, layer in np.ndindex(num_micro_steps, num_layers):
        loads_E, reached = counts[m, layer].sum(axis=0, dtype=np.int64), int(found.max_load_ML[m, layer])
        limits = (loads_E, found.home_LE[layer].astype(np.int64), ranks, found.topology.redundant_slots)
        mean = -(-int(loads_E.sum()) // ranks)
        bound = max(int(found.bound_ML[m, layer]), least_where_slots_lack(*limits))
        proof = "level" if reached == mean else "slots" if reached == bound else "open"
        if proof == "open" and num_experts <= PROGRAM_EXPERTS:
            bound = least_of_all_plans(*limits)
            proof = "program" if reached == bound else "missed"
        proofs[proof] += 1
        gap = max(gap, reached / bound - 1)
        bounds.append(bound / mean)
    return {"balance": dict(proofs), "gap": round(gap, 5), "bound_mean": round(float(np.mean(bounds)), 5)}


def _oracle(workload: str, size: Setting, counts: Ints) -> list[str]:
    """Name the checks that a planned cell of a micro-step with a burst fails."""
    step = MICRO_STEPS + 3
    topology = HARDWARE["h100"].topology(size.num_ranks, 2)
    cell = plan(counts[3:4], topology, PlanOptions(tolerance=0.0)).cell(0, 0)
    ids_TK = routes(workload, size.num_experts, size.top_k, size.tokens, step, SEED)
    return failed_checks(
        cell, np.tile(ids_TK, (size.num_ranks, 1)), sources(workload, size.tokens, size.num_ranks), size
    )
