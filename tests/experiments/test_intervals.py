"""Intervals over seeds against scipy's tests; the collapse rule against its own words."""

import numpy as np
import pytest
from scipy import stats

from experiments.intervals import paired_difference, paired_ratio
from experiments.series import WINDOW, collapse_step

VALUES = {0: 0.71, 1: 0.78, 2: 0.64, 3: 0.9, 4: 0.66}
OTHERS = {4: 0.5, 2: 0.61, 1: 0.8, 7: 3.0, 0: 0.4}


def test_paired_differences_are_scipys_over_the_seeds_of_both():
    seeds = [0, 1, 2, 4]
    found = paired_difference(VALUES, OTHERS)
    test = stats.ttest_rel([VALUES[s] for s in seeds], [OTHERS[s] for s in seeds])
    expected = test.confidence_interval(0.95)
    assert found.seeds == 4
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    unpaired = stats.ttest_ind([VALUES[s] for s in seeds], [OTHERS[s] for s in seeds]).confidence_interval(0.95)
    assert found.low != pytest.approx(unpaired.low), "the seeds are paired"


def test_ratios_are_geometric_and_need_positive_figures():
    found = paired_ratio(VALUES, OTHERS)
    seeds = [0, 1, 2, 4]
    logs = stats.ttest_rel(np.log([VALUES[s] for s in seeds]), np.log([OTHERS[s] for s in seeds]))
    expected = np.exp(logs.confidence_interval(0.95))
    assert (found.low, found.high) == pytest.approx(tuple(expected))
    assert found.mean == pytest.approx(stats.gmean([VALUES[s] / OTHERS[s] for s in seeds]))
    assert paired_ratio(VALUES, {**OTHERS, 0: 0.0}) is None
    assert paired_ratio(VALUES, {9: 1.0}) is None


def rule(rewards):
    """Step by step, as it is written."""
    averages = [np.mean(rewards[i : i + WINDOW]) for i in range(len(rewards) - WINDOW + 1)]
    for i in range(len(averages)):
        last = range(i - WINDOW + 1, i + 1)
        if last[0] >= 0 and all(averages[j] < 0.5 * max(averages[: j + 1]) for j in last):
            return i + WINDOW - 1
    return None


def test_collapse_is_decided_as_the_rule_says():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(80):
        length = int(rng.integers(1, 60))
        rewards = np.clip(np.cumsum(rng.normal(0, 0.12, length)) + rng.random(), 0, 1)
        found.append(collapse_step(rewards.tolist()))
        assert found[-1] == rule(rewards)
    assert 8 < sum(step is not None for step in found) < 72, "both outcomes were seen"
