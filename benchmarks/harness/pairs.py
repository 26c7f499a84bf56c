"""Interleaved timing: two callables in turn, compared pair by pair, so that drift of the machine cancels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class PairedRatio:
    """Time of a candidate over a baseline.

    Attributes:
        ratio: median over the pairs.
        low, high: quartiles over the pairs.
        baseline_ms: median time of the baseline.
    """

    ratio: float
    low: float
    high: float
    baseline_ms: float


Clock = Callable[[], float]


def compare(
    candidate: Callable[[], object],
    baseline: Callable[[], object],
    *,
    pairs: int,
    clock: Clock = time.perf_counter,
) -> PairedRatio:
    """Run both `pairs` times, swapping which goes first, after one warm-up of each.

    Args:
        candidate: what is measured.
        baseline: what it is measured against.
        pairs: how often each runs.
        clock: in seconds. `time.thread_time` leaves out the waits of a busy machine, for work of one thread.
    """
    candidate()
    baseline()
    ratios, base = [], []
    for pair in range(pairs):
        first, second = (candidate, baseline) if pair % 2 else (baseline, candidate)
        times = {id(first): _seconds(first, clock)}
        times[id(second)] = _seconds(second, clock)
        ratios.append(times[id(candidate)] / times[id(baseline)])
        base.append(times[id(baseline)])
    low, median, high = statistics.quantiles(ratios, n=4)
    return PairedRatio(median, low, high, statistics.median(base) * 1e3)


def _seconds(run: Callable[[], object], clock: Clock) -> float:
    start = clock()
    run()
    return clock() - start
