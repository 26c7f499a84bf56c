"""Rows that ranks receive, known before the step, against what buffers of other policies hold.

`overflow` dispatches every pick of drawn traces, one by one, and counts the cells in which a rank gets more rows than
`known_rows` reserves; tokens without a route pick at random, and each one rank's experts in every eighth micro-step.
`policies` are drawn steps of the calibrated workloads: shares of cells and of rows, at homes and under plans of two
slots and 1.02. Under plans the rows are those of the executor's schedules, which are compared as well.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.memory_peaks import peak_cases
from benchmarks.planner import costs_of
from foreroute.layout import Packing
from foreroute.plan import PlanOptions, StepPlan, known_rows
from foreroute.plan.received_rows import KnownRows
from foreroute.plan.schedule import CellSchedule
from foreroute.planner import plan
from foreroute.simulate.workload import WORKLOADS
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import RoutedLayer, RoutingSpec

CELLS = ("G8", "G16", "G64")
WAYS = ("homes", "plans")
LAYERS, STEPS, EXPERTS, TOP_K, RANKS = 48, 2100, 32, 4, 8
GAP = 5
"""Tokens of a sequence; its last has no route."""


def run(quick: bool) -> dict[str, Any]:
    """Cells that overflow, of how many; and the policies by workload."""
    steps, layers = (100, 4) if quick else (STEPS, 8)
    metrics: dict[str, Any] = _overflow(steps)
    baselines: dict[str, Any] = {}
    for name in CELLS:
        found, wrong = _policies(name, layers)
        metrics["schedules_that_differ"] = metrics.get("schedules_that_differ", 0) + wrong
        for way, policies in found.items():
            known = {one.name: asdict(one) for one in policies if one.name.startswith("known")}
            others = {one.name: asdict(one) for one in policies if one.name not in known}
            metrics.setdefault("policies", {}).setdefault(name, {})[way] = known
            baselines.setdefault(name, {})[way] = others
    metrics["memory"], baselines["memory"] = _memory(peak_cases(2 if quick else 12, quick=quick))
    return {"metrics": metrics, "baselines": baselines}


def _memory(cases: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sum up forecasts over counted peaks: the worst and the mean error of each way, and of less than a forecast."""

    def errors(name: str, way: str) -> NDArray[np.float64]:
        return np.array([case[name] / case["measured"] - 1 for case in cases if case["way"] == way])

    worst = {
        name: {way: round(float(np.abs(errors(name, way)).max()), 4) for way in WAYS}
        for name in ("forecast", "without_rows", "without_slots")
    }
    mean = {way: round(float(np.abs(errors("forecast", way)).mean()), 4) for way in WAYS}
    least = {way: round(float(errors("forecast", way).min()), 4) for way in WAYS}
    return {"worst_error": worst.pop("forecast"), "mean_error": mean, "least": least, "cases": len(cases)}, worst


def _overflow(num_micro_steps: int) -> dict[str, int]:
    """Count cells in which picks that are dispatched one by one exceed what is reserved, and unused rows."""
    spec = RoutingSpec(EXPERTS, TOP_K, tuple(RoutedLayer(i) for i in range(LAYERS)), model="drawn")
    home_LE = np.stack([np.random.default_rng(i).permutation(np.arange(EXPERTS) % RANKS) for i in range(LAYERS)])
    totals = np.zeros(4, np.int64)
    for block in range(0, num_micro_steps, 100):
        trace = synthetic_trace(spec, [GAP] * (100 * RANKS), seed=block, correlation=0.7)
        place_S = np.arange(len(trace))
        packing = Packing((place_S // RANKS).astype(np.int32), (place_S % RANKS).astype(np.int32), 100, RANKS)
        known = known_rows(trace, home_LE, packing=packing)
        native_NLK = np.argsort(np.random.default_rng(block).random((len(trace.valid_N), 1, EXPERTS)))[..., :TOP_K]
        micro_step_N = np.repeat(packing.micro_step_S, trace.lengths)
        rows, routed = np.zeros_like(known.rows_MLG), np.zeros_like(known.rows_MLG)
        for layer in range(LAYERS):
            # of the experts of one rank, the worst that tokens without a route can pick
            worst_K = np.flatnonzero(home_LE[layer] == block // 100 % RANKS)[:TOP_K]
            free = np.where((micro_step_N % 8 == 0)[:, None], worst_K, native_NLK[:, 0])
            picks = np.where(trace.valid_N[:, None], trace.expert_ids_NLK[:, layer], free)
            place_NK = micro_step_N[:, None] * RANKS + home_LE[layer][picks]
            for into, some in ((rows, slice(None)), (routed, trace.valid_N)):
                into[:, layer] = np.bincount(place_NK[some].ravel(), minlength=100 * RANKS).reshape(100, RANKS)
        over = (rows > known.reserved_MLG).any(axis=2)
        totals += [over.sum(), over.size, np.abs(known.rows_MLG - routed).sum(), routed.sum()]
    names = ("overflow", "cells", "unused_rows", "rows")
    return dict(zip(names, totals.tolist(), strict=True))


def _policies(name: str, layers: int) -> tuple[dict[str, Any], int]:
    """Compare policies on a drawn step after the one before it; and count ranks whose schedule has other rows."""
    workload = replace(WORKLOADS[name], num_layers=layers)
    counts, before = (workload.draw(seed=0, step=step).counts() for step in (1, 0))
    topology = costs_of(workload.num_experts).hardware.topology(workload.num_ranks, 2)
    home_LE = topology.contiguous_home_LE(layers, workload.num_experts)
    found, wrong = {}, 0
    for way in WAYS:
        options = PlanOptions(replicas=way == "plans")
        step, step_before = (plan(one, topology, options, home_LE=home_LE) for one in (counts, before))
        known = known_rows(counts, step, top_k=workload.top_k)
        found[way] = known.policies(known_rows(before, step_before))
        wrong += _differing(step, counts, known)
    return found, wrong


def _differing(step: StepPlan, counts: np.ndarray, known: KnownRows) -> int:
    """Count cells and ranks whose schedule receives other rows than are known."""
    return sum(
        int(CellSchedule.of(step.cell(m, layer), counts[m, layer], g).receive_G.sum() != known.rows_MLG[m, layer, g])
        for m, layer, g in np.ndindex(known.rows_MLG.shape)
    )
