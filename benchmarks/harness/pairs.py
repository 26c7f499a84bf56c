"""Interleaved measurement: two callables in turn, compared pair by pair, so that drift of the machine cancels.

A ratio near 1 is a figure only where the run resolved it: `near_one` holds back what a few pairs on a busy machine
happened to say.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

RESOLUTION = 0.02
"""The widest 95 % interval of a ratio near 1 that still says something about a cost of a percent."""


@dataclass(frozen=True)
class PairedRatio:
    """Time of a candidate over a baseline: median, quartiles, and the median's 95 % interval, None below six pairs."""

    ratio: float
    low: float
    high: float
    lower: float | None
    upper: float | None
    baseline_ms: float
    pairs: int

    @classmethod
    def of(cls, seconds: Sequence[float], baseline: Sequence[float]) -> PairedRatio:
        """Compare seconds that were taken in turn, two or more of each."""
        ratios = [one / other for one, other in zip(seconds, baseline, strict=True)]
        # inclusive: those of two pairs are between the two
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        lower, upper = median_interval(ratios) or (None, None)
        return cls(median, low, high, lower, upper, statistics.median(baseline) * 1e3, len(ratios))

    @property
    def unresolved(self) -> str:
        """Why the ratio is no figure where it is near 1; empty where it is one."""
        if self.lower is None or self.upper is None:
            return f"not resolved: a 95 % interval takes six pairs, and these are {self.pairs}"
        if self.upper - self.lower > RESOLUTION:
            return f"not resolved: {self.pairs} pairs leave a 95 % interval of {self.lower:.3f} to {self.upper:.3f}"
        return ""

    def shown(self) -> dict[str, float | None]:
        """`median`, and `lower` and `upper` of its 95 % interval, of a ratio that is not near 1."""
        values = {"median": self.ratio, "lower": self.lower, "upper": self.upper}
        return {name: None if value is None else round(value, 4) for name, value in values.items()}


Clock = Callable[[], float]


def compare(
    candidate: Callable[[], object], baseline: Callable[[], object], *, pairs: int, clock: Clock = time.perf_counter
) -> PairedRatio:
    """Run both `pairs` times, swapping which goes first, after one warm-up of each.

    The clock `time.thread_time` leaves out the waits of a busy machine, for work of one thread.
    """
    candidate()
    baseline()
    seconds: list[float] = []
    base: list[float] = []
    for pair in range(pairs):
        # what runs second finds caches as the first left them
        for is_candidate in (True, False) if pair % 2 else (False, True):
            taken = _seconds(candidate if is_candidate else baseline, clock)
            (seconds if is_candidate else base).append(taken)
    return PairedRatio.of(seconds, base)


def seconds_in_turn(
    works: Mapping[str, Callable[[], object]], *, rounds: int, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of each of several works that run in turn, after a round that warms up. Rounds begin one work later."""
    names = list(works)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            taken = _seconds(works[name], clock)
            if number:
                seconds[name].append(taken)
    return seconds


def quickest(work: Callable[[], object], repeats: int) -> float:
    """Processor seconds of the quickest of several runs, all threads together, for work of one thread."""
    return min(_seconds(work, time.process_time) for _ in range(repeats))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest pair of order statistics, alike from both ends, that holds the true median in 95 % of samples."""
    # Each value falls below the median like a fair coin, whatever the distribution. Of fewer than six values even the
    # smallest and the largest miss it more often.
    n, k, misses = len(values), 0, 0
    # as many samples of 2^n leave the median outside of the (k+1)-th smallest and largest
    while k < n // 2 and 40 * (misses + comb(n, k)) <= 2**n:
        misses += comb(n, k)
        k += 1
    ascending = sorted(values)
    return (ascending[k - 1], ascending[-k]) if k else None


def near_one(name: str, found: PairedRatio) -> dict[str, Any]:
    """Report a ratio near 1: `<name>_ratio`, or None and `<name>_reason`; `<name>_interval` and `<name>_quartiles`."""
    why, shown = found.unresolved, found.shown()
    return {
        f"{name}_ratio": None if why else shown["median"],
        **({f"{name}_reason": why} if why else {}),
        f"{name}_interval": None if found.lower is None else [shown["lower"], shown["upper"]],
        f"{name}_quartiles": [round(found.low, 4), round(found.high, 4)],
    }


def _seconds(run: Callable[[], object], clock: Clock) -> float:
    begun = clock()
    run()
    return clock() - begun
