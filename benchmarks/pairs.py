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


def compare(candidate: Callable[[], object], baseline: Callable[[], object], *, pairs: int) -> PairedRatio:
    """Run both `pairs` times, swapping which goes first, after one warm-up of each."""
    candidate()
    baseline()
    ratios, base = [], []
    for pair in range(pairs):
        first, second = (candidate, baseline) if pair % 2 else (baseline, candidate)
        times = {id(first): _seconds(first)}
        times[id(second)] = _seconds(second)
        ratios.append(times[id(candidate)] / times[id(baseline)])
        base.append(times[id(baseline)])
    low, median, high = statistics.quantiles(ratios, n=4)
    return PairedRatio(median, low, high, statistics.median(base) * 1e3)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
