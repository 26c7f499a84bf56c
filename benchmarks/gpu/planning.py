"""Plans of a step on 64 ranks: time per cell on one thread and on all cores, and what they balance.

The workload is the one of `benchmarks/planner.py`: 32 micro-steps of 48 layers with 128 experts, in nodes of 8 ranks.
The GPU has no part in it; its machine's cores have, beside which a step runs. That every number of threads makes the
same valid plan is shown by tests/planner.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.figures import Figures
from benchmarks.harness.schedule_bench import host_work
from foreroute.costs.presets import HARDWARE
from foreroute.plan import PlanOptions, StepPlan, Topology
from foreroute.planner import plan
from foreroute.simulate.workload import WORKLOADS

SLOTS = 2
MOVES = 16
"""Most experts of a layer that change their home, where homes are planned too."""
REPEATS = 5


def run(figures: Figures) -> None:
    """Plan on 1, 2, 4, ... threads and on as many as there are cores."""
    workload = WORKLOADS["G64"]
    if not figures.full:
        workload = replace(workload, num_ranks=8, num_micro_steps=3, num_layers=5, num_experts=32)
    cores = len(os.sched_getaffinity(0))
    threads = sorted({1, 2, 4, 8, cores} - {n for n in (2, 4, 8) if n > cores}) if figures.full else [1, 2, 3]
    topology = HARDWARE["h100"].topology(workload.num_ranks, SLOTS)
    counts = workload.draw(seed=1, step=1).counts()
    figures.record(ranks=workload.num_ranks, layers=counts.shape[1], micro_steps=counts.shape[0], cores=cores)
    _balance(figures, counts, topology)
    _times(figures, counts, topology, threads)
    moving = [figures.timed(lambda: _planned(counts, topology, threads[-1], MOVES)) for _ in range(3)]
    figures.record(step_with_homes_all_cores_ms=round(statistics.median(moving) * 1e3, 2))
    for figure, by in host_work(REPEATS).items():
        figures.record(**{f"{figure}_{name}": round(value, 4) for name, value in by.items()})
    figures.record(host_ms_per_cell_aim="<= 0.05", schedule_us_per_cell_aim="<= 20")


def _planned(counts: NDArray[np.int32], topology: Topology, threads: int, home_moves: int = 0) -> StepPlan:
    return plan(counts, topology, PlanOptions(threads=threads, home_moves=home_moves))


def _balance(figures: Figures, counts: NDArray[np.int32], topology: Topology) -> None:
    """The slowest rank over the mean: at home alone, and with replicas."""
    home_E = topology.contiguous_home_E(counts.shape[3])
    load_MLG = np.stack([counts[..., home_E == rank].sum(axis=(2, 3)) for rank in range(topology.num_ranks)], axis=-1)
    planned = _planned(counts, topology, 1)
    before, after = (most_ML / load_MLG.mean(axis=-1) for most_ML in (load_MLG.max(axis=-1), planned.max_load_ML))
    figures.record(
        imbalance_before_ratio=round(float(before.mean()), 4),
        imbalance_before_worst_ratio=round(float(before.max()), 4),
        imbalance_after_ratio=round(float(after.mean()), 4),
        imbalance_after_worst_ratio=round(float(after.max()), 4),
        fetches_per_cell=round(float(planned.hosts.fetched_R.sum()) / after.size, 2),
    )
    if after.mean() >= before.mean():
        raise AssertionError(f"the slowest rank has {after.mean():.3f} times the mean, {before.mean():.3f} at home")


def _times(figures: Figures, counts: NDArray[np.int32], topology: Topology, threads: Sequence[int]) -> None:
    """Numbers of threads in turn, so that drift of the machine meets all of them."""
    seconds: dict[int, list[float]] = {n: [] for n in threads}
    for repeat in range(REPEATS):
        if repeat and figures.seconds_left < 2 * sum(times[-1] for times in seconds.values()):
            break
        for n, times in seconds.items():
            times.append(figures.timed(partial(_planned, counts, topology, n)))
    medians = {n: statistics.median(times) for n, times in seconds.items()}
    speed_ups = [alone / most for alone, most in zip(seconds[1], seconds[threads[-1]], strict=True)]
    cells = counts.shape[0] * counts.shape[1]
    figures.record(**{f"per_cell_{n}_threads_us": round(median * 1e6 / cells, 2) for n, median in medians.items()})
    figures.record(
        per_cell_all_cores_us=round(medians[threads[-1]] * 1e6 / cells, 2),
        step_1_thread_ms=round(medians[1] * 1e3, 2),
        step_all_cores_ms=round(medians[threads[-1]] * 1e3, 2),
        speed_up_ratio=round(statistics.median(speed_ups), 2),
        speed_up_ratio_range=[round(min(speed_ups), 2), round(max(speed_ups), 2)],
        repeats=len(speed_ups),
    )
