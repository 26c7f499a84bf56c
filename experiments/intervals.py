"""Intervals over seeds, and how they are written.

A seed is one draw of weights, problems and samples; nothing else is averaged over.

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
    """A mean over seeds, geometric of a ratio, and its two-sided interval; ends are NaN with fewer than two seeds."""

    mean: float
    low: float
    high: float
    seeds: int

    def excludes(self, value: float) -> bool:
        """Say whether the value lies outside; never with fewer than two seeds."""
        return self.low > value or self.high < value


def mean_interval(values: NDArray[np.float64], level: float = LEVEL) -> Interval:
    """Student's t interval of the mean of values [seeds]."""
    values = np.asarray(values, np.float64)
    count = len(values)
    mean = float(values.mean()) if count else math.nan
    if count < 2:
        return Interval(mean, math.nan, math.nan, count)
    # ddof=1: the deviation is estimated from the same few seeds
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


def number(value: float, digits: int = 3) -> str:
    """Write a number with so many significant digits, and with an exponent below a ten thousandth."""
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1e}" if abs(value) < 1e-4 else f"{value:.{digits}g}"


def mean_text(interval: Interval) -> str:
    """Write the mean alone."""
    return number(interval.mean)


def percent_text(interval: Interval) -> str:
    """Write the mean as a share, with two significant digits."""
    value = interval.mean
    return "-" if not math.isfinite(value) else "0 %" if value == 0 else f"{100 * value:.2g} %"


def interval_text(interval: Interval, unit: str = "", *, signed: bool = False) -> str:
    """Write the mean and, from two seeds on, the interval's ends."""
    sign = "+" if signed and interval.mean > 0 else ""
    if math.isnan(interval.low):
        return f"{sign}{number(interval.mean)}{unit}"
    for digits in (3, 4, 5, 6):
        mean, low, high = (number(value, digits) for value in (interval.mean, interval.low, interval.high))
        # three digits may show both ends alike, as if the interval were empty
        if low != high or interval.low == interval.high:
            break
    return f"{sign}{mean}{unit} [{low}, {high}]"
