"""Plans of a step on 64 ranks: time on one thread and on all cores, and what they balance.

The workload is the one of `benchmarks/planner.py`: 32 micro-steps of 48 layers with 128 experts, in nodes of 8 ranks.
The GPU has no part in it; its machine's cores have, beside which a step runs. That every number of threads makes the
same valid plan is shown by tests/planner.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.figures import Figures
from benchmarks.harness.pairs import seconds_in_turn
from benchmarks.harness.schedule_bench import host_work
from foreroute.costs.presets import HARDWARE
from foreroute.plan import PlanOptions, StepPlan, Topology
from foreroute.planner import plan
from foreroute.simulate.workload import WORKLOADS

SLOTS = 2
REPEATS = 5


def run(figures: Figures) -> None:
    """Plan on one thread and on as many as there are cores."""
    workload = WORKLOADS["G64"]
    if not figures.full:
        workload = replace(workload, num_ranks=8, num_micro_steps=3, num_layers=5, num_experts=32)
    topology = HARDWARE["h100"].topology(workload.num_ranks, SLOTS)
    counts = workload.draw(seed=1, step=1).counts()
    works: dict[str, Callable[[], StepPlan]] = {
        "1_thread": partial(plan, counts, topology, PlanOptions(threads=1)),
        "all_cores": partial(plan, counts, topology, PlanOptions(threads=len(os.sched_getaffinity(0)))),
    }
    figures.record(ranks=workload.num_ranks, layers=counts.shape[1], micro_steps=counts.shape[0])
    _balance(figures, works["1_thread"](), counts, topology)
    for name, times in seconds_in_turn(works, rounds=REPEATS).items():
        figures.record(**{f"step_{name}_ms": round(statistics.median(times) * 1e3, 2)})
    for figure, by in host_work(REPEATS).items():
        figures.record(**{f"{figure}_{name}": round(value, 4) for name, value in by.items()})
    figures.record(host_ms_per_cell_aim="<= 0.05", schedule_us_per_cell_aim="<= 20")


def _balance(figures: Figures, planned: StepPlan, counts: NDArray[np.int32], topology: Topology) -> None:
    """The slowest rank over the mean: at home alone, and with replicas."""
    mean_ML = counts.sum(axis=(2, 3)) / topology.num_ranks
    at_home = plan(counts, topology, PlanOptions(replicas=False))
    before, after = (each.max_load_ML / mean_ML for each in (at_home, planned))
    figures.record(
        imbalance_before_ratio=round(float(before.mean()), 4),
        imbalance_after_ratio=round(float(after.mean()), 4),
        imbalance_after_worst_ratio=round(float(after.max()), 4),
        fetches_per_cell=round(float(planned.hosts.fetched_R.sum()) / after.size, 2),
    )
    if after.mean() >= before.mean():
        raise AssertionError(f"the slowest rank has {after.mean():.3f} times the mean, {before.mean():.3f} at home")
