"""Intervals over seeds. A seed is one draw of weights, problems and samples; nothing else is averaged over.

Means and paired differences have a t interval: of n seeds, mean ± t(n - 1) s / sqrt(n). Arms of one seed share weights
and problems, so differences are taken within seeds. Ratios of positive figures are differences of their logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and its two-sided interval; ends are NaN with fewer than two seeds.

    Attributes:
        mean: over seeds; of a ratio the geometric mean.
        low: the lower end.
        high: the upper end.
        seeds: how many.
    """

    mean: float
    low: float
    high: float
    seeds: int

    def excludes(self, value: float) -> bool:
        """Whether the value lies outside; never with fewer than two seeds."""
        return self.low > value or self.high < value


def mean_interval(values: NDArray[np.float64], level: float = LEVEL) -> Interval:
    """Student's t interval of the mean of values [seeds]."""
    values = np.asarray(values, np.float64)
    count = len(values)
    mean = float(values.mean()) if count else math.nan
    if count < 2:
        return Interval(mean, math.nan, math.nan, count)
    half = float(t.ppf((1 + level) / 2, count - 1) * values.std(ddof=1) / math.sqrt(count))
    return Interval(mean, mean - half, mean + half, count)


def paired_difference(first: Mapping[int, float], second: Mapping[int, float], level: float = LEVEL) -> Interval:
    """First minus second over the seeds that both have."""
    seeds = sorted(first.keys() & second.keys())
    return mean_interval(np.array([first[seed] - second[seed] for seed in seeds]), level)


def paired_ratio(first: Mapping[int, float], second: Mapping[int, float], level: float = LEVEL) -> Interval | None:
    """Geometric mean of first over second, by logarithms; None when a figure is not positive."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds or min(min(first[seed], second[seed]) for seed in seeds) <= 0:
        return None
    logs = mean_interval(np.array([math.log(first[seed] / second[seed]) for seed in seeds]), level)
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.seeds)
