"""Measured step times of many plans, with their counts: what a model of step times is validated against."""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.execution_bench import Bench, in_processes
from foreroute.balance import PlanOptions, StepPlan
from foreroute.transfer.exchange import PeerGroup

SKEWS = (0.0, 0.15, 0.3, 0.6)
OPTIONS = (PlanOptions(replicas=False), PlanOptions(tolerance=0.3), PlanOptions(tolerance=0.0))


@dataclass(frozen=True, eq=False)
class TimedPlan:
    """A plan that was executed.

    Attributes:
        plan: of the step.
        counts_MLGE: int32 [M, L, G, E], what it was made for.
        seconds: of every step, from a barrier to when the last rank has ended its backward; in the order of running.
    """

    plan: StepPlan
    counts_MLGE: NDArray[np.int32]
    seconds: list[float]

    @property
    def median_s(self) -> float:
        """Of a step."""
        return statistics.median(self.seconds)


def timed_plans(num_ranks: int = 2, *, repeats: int = 7) -> list[TimedPlan]:
    """Execute 12 plans on gloo processes: four skews of the routes, each static, loosely and fully balanced.

    Steps are those of `execution_bench` (its `SIZES`, `MICRO_STEPS`, `BATCH`). All plans run once in turn, then all run
    again, so that drift of the machine meets all of them. With more processes than cores, a step takes as long as all
    ranks together, and tells nothing of the slowest one: use as many ranks as there are idle cores.
    """
    found: list[TimedPlan] = in_processes(_timed, num_ranks, repeats)
    return found


def _timed(rank: int, num_ranks: int, repeats: int) -> list[TimedPlan]:
    first = Bench.of(rank, num_ranks)
    benches = [Bench.routed_anew(first.routed, first.placed, rank, num_ranks, skew=skew) for skew in SKEWS]
    work = [(bench, bench.plan(options)) for bench in benches for options in OPTIONS]
    seconds: list[list[float]] = [[] for _ in work]
    with closing(first.engine(PeerGroup(timeout_s=120), slots="layer")) as engine:
        first.placed.use(engine)
        for repeat in range(repeats + 1):
            for (bench, plan), times in zip(work, seconds, strict=True):
                engine.publish()  # slots are empty at the start of every step
                took_s = _step_seconds(bench, plan)
                if repeat:  # the first warms up
                    times.append(took_s)
    return [TimedPlan(plan, bench.counts_MLGE, times) for (bench, plan), times in zip(work, seconds, strict=True)]


def _step_seconds(bench: Bench, plan: StepPlan) -> float:
    dist.barrier()
    begun = time.perf_counter()
    bench.step(plan)
    dist.barrier()
    return time.perf_counter() - begun
