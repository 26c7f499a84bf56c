"""Figures of arms: what is asked of the finished cells of one arm, and means and comparisons of it over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.intervals import Interval, mean_interval, paired_difference, paired_ratio

Metric = Callable[[dict[str, Any]], float | None]
"""Takes one figure out of those of a cell; None where the cell lacks it."""


@dataclass(frozen=True)
class Measure:
    """A metric of an arm."""

    arm: str
    metric: Metric


class Arms:
    """Results of a grid, one line for each finished cell."""

    def __init__(self, results: Mapping[str, dict[str, Any]]) -> None:
        self._by_arm: dict[str, dict[int, dict[str, Any]]] = {}
        for line in results.values():
            self._by_arm.setdefault(line["arm"], {})[line["seed"]] = line["figures"]

    def __contains__(self, arm: str) -> bool:
        return arm in self._by_arm

    def values(self, measure: Measure) -> dict[int, float]:
        """Return a measure by seed; seeds that lack it are left out."""
        by_seed = sorted(self._by_arm.get(measure.arm, {}).items())
        found = {seed: measure.metric(figures) for seed, figures in by_seed}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, measure: Measure) -> Interval:
        """Average a measure over seeds."""
        return mean_interval(np.array(list(self.values(measure).values())))

    def difference(self, first: Measure, second: Measure) -> Interval:
        """Subtract the second measure from the first, over the seeds that have both."""
        return paired_difference(self.values(first), self.values(second))

    def ratio(self, first: Measure, second: Measure | None) -> Interval | None:
        """Divide the first measure by the second, over the seeds that have both; alone it is a ratio itself."""
        above = self.values(first)
        return paired_ratio(above, dict.fromkeys(above, 1.0) if second is None else self.values(second))

    def collapsed(self, arm: str) -> tuple[int, int]:
        """Count the runs of an arm that collapsed, and all of them."""
        runs = self._by_arm.get(arm, {}).values()
        return sum(run["collapsed_at"] is not None for run in runs), len(runs)


def reward_last(figures: dict[str, Any]) -> float:
    """Mean reward of the last ten steps; 0 in a run that diverged, which has none."""
    return 0.0 if figures["diverged"] else float(figures["reward_last"])


def reward_first(figures: dict[str, Any]) -> float:
    """Mean reward of the first step, before any update."""
    return float(figures["reward"][0])


def collapse(figures: dict[str, Any]) -> float:
    """1 in a run that collapsed, else 0: its mean is the share of runs."""
    return float(figures["collapsed_at"] is not None)


def spikes(figures: dict[str, Any]) -> float:
    """Share of steps whose gradient norm is above 10 before clipping."""
    return float(figures["spikes"])


def over_steps(name: str) -> Metric:
    """Return the metric of a figure of the steps, averaged over a run."""
    return lambda figures: float(figures["mean"][name])


def static(replay: str, name: str) -> Metric:
    """Return the metric of a figure at fixed weights; None for a model that has no such pass."""
    return lambda figures: float(figures[replay][name]) if replay in figures else None


def roughness(name: str) -> Metric:
    """Return the metric of changes from stretch to stretch: their root mean square over the mean stretch."""

    def of(figures: dict[str, Any]) -> float | None:
        stretches = np.array(figures["binned"][name])
        return float(np.sqrt(np.mean(np.diff(stretches) ** 2)) / stretches.mean()) if len(stretches) > 1 else None

    return of


def growth(name: str) -> Metric:
    """Return the metric of growth in a run: a figure's last third over its first third."""

    def of(figures: dict[str, Any]) -> float | None:
        stretches = figures["binned"][name]
        third = len(stretches) // 3
        first, last = sum(stretches[:third]), sum(stretches[-third:])
        return last / first if third and first > 0 and last > 0 else None

    return of


def at(*path: str) -> Metric:
    """Return the metric of a figure by the names that lead to it."""

    def of(figures: dict[str, Any]) -> float:
        found: Any = figures
        for name in path:
            found = found[name]
        return float(found)

    return of


def over(above: Metric, below: Metric) -> Metric:
    """Return the metric of one figure over another of the same cell; None where one is missing or `below` is 0."""

    def of(figures: dict[str, Any]) -> float | None:
        first, second = above(figures), below(figures)
        return first / second if first is not None and second else None

    return of
