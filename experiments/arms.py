"""Figures by arm and seed, as the page asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.intervals import Interval, mean_interval, paired_difference, paired_ratio

Metric = Callable[[dict[str, Any]], float | None]


class Arms:
    """Results of a grid, one line for each finished cell."""

    def __init__(self, results: Mapping[str, dict[str, Any]]) -> None:
        self.results = results
        self._by_arm: dict[str, dict[int, dict[str, Any]]] = {}
        for line in results.values():
            self._by_arm.setdefault(line["arm"], {})[line["seed"]] = line["figures"]

    def __contains__(self, arm: str) -> bool:
        return arm in self._by_arm

    def seeds(self, arm: str) -> dict[int, dict[str, Any]]:
        """Figures of an arm by seed; empty when no cell of it is finished."""
        return dict(sorted(self._by_arm.get(arm, {}).items()))

    def values(self, arm: str, metric: Metric) -> dict[int, float]:
        """One figure of an arm by seed; seeds that lack it are left out."""
        found = {seed: metric(figures) for seed, figures in self.seeds(arm).items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def mean(self, arm: str, metric: Metric) -> Interval:
        """Over seeds."""
        return mean_interval(np.array(list(self.values(arm, metric).values())))

    def difference(self, first: str, second: str, metric: Metric, of_second: Metric | None = None) -> Interval:
        """First minus second over the seeds of both; `of_second` when they are different figures."""
        return paired_difference(self.values(first, metric), self.values(second, of_second or metric))

    def ratio(self, first: str, second: str, metric: Metric, of_second: Metric | None = None) -> Interval | None:
        """First over second over the seeds of both; `of_second` when they are different figures."""
        return paired_ratio(self.values(first, metric), self.values(second, of_second or metric))

    def collapsed(self, arm: str) -> tuple[int, int]:
        """How many of its runs collapsed, and how many there are."""
        runs = self.seeds(arm).values()
        return sum(run["collapsed_at"] is not None for run in runs), len(runs)


def metric(name: str) -> Metric:
    """A metric by its name, as tables and claims have it: a function of `METRICS` and its arguments after colons.

    "a / b" is one metric over another; None where one of them is missing, or the second is 0.
    """
    if " / " in name:
        above, below = map(metric, name.split(" / "))
        return lambda figures: _ratio(above(figures), below(figures))
    function, *arguments = name.split(":")
    return METRICS[function](*arguments)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def reward_last(figures: dict[str, Any]) -> float:
    """Mean reward of the last ten steps; 0 in a run that diverged, which has none."""
    return 0.0 if figures["diverged"] else float(figures["reward_last"])


def over_steps(name: str) -> Metric:
    """A figure of the steps, averaged over a run."""
    return lambda figures: float(figures["mean"][name])


def reward_first(figures: dict[str, Any]) -> float:
    """Mean reward of the first step, before any update."""
    return float(figures["reward"][0])


def collapse(figures: dict[str, Any]) -> float:
    """1 in a run that collapsed, else 0: its mean is the share of runs."""
    return float(figures["collapsed_at"] is not None)


def spikes(figures: dict[str, Any]) -> float:
    """Share of steps whose gradient norm is above 10 before clipping."""
    return float(figures["spikes"])


def static(replay: str, name: str) -> Metric:
    """A figure at fixed weights; None for a model that has no such pass."""
    return lambda figures: float(figures[replay][name]) if replay in figures else None


def roughness(name: str) -> Metric:
    """Root mean square of the changes from stretch to stretch of a run over the mean, of a figure kept in stretches."""

    def of(figures: dict[str, Any]) -> float | None:
        stretches = np.array(figures["binned"][name])
        return float(np.sqrt(np.mean(np.diff(stretches) ** 2)) / stretches.mean()) if len(stretches) > 1 else None

    return of


def growth(name: str) -> Metric:
    """Last third of a run over its first third, of a figure that is kept in stretches."""

    def of(figures: dict[str, Any]) -> float | None:
        stretches = figures["binned"][name]
        third = len(stretches) // 3
        first, last = sum(stretches[:third]), sum(stretches[-third:])
        return last / first if third and first > 0 and last > 0 else None

    return of


def at(*path: str) -> Metric:
    """A figure by the names that lead to it."""

    def of(figures: dict[str, Any]) -> float:
        found: Any = figures
        for name in path:
            found = found[name]
        return float(found)

    return of


METRICS: dict[str, Callable[..., Metric]] = {
    "reward_first": lambda: reward_first,
    "reward_last": lambda: reward_last,
    "collapse": lambda: collapse,
    "spikes": lambda: spikes,
    "steps": over_steps,
    "static": static,
    "roughness": roughness,
    "growth": growth,
    "at": at,
}
"""What `metric` knows, by the first part of a name."""
