"""Figures of runs and of steps, by hand or against their rules."""

import numpy as np
import pytest

from experiments.series import COLLAPSED, WINDOW, collapse_step
from experiments.unevenness import contiguous_imbalance

HIGH = [1.0] * 20


def collapsed(rewards):
    """The rule, word by word."""
    highest, in_a_row = -np.inf, 0
    for step in range(WINDOW - 1, len(rewards)):
        average = sum(rewards[step - WINDOW + 1 : step + 1]) / WINDOW
        highest = max(highest, average)
        in_a_row = in_a_row + 1 if average < COLLAPSED * highest else 0
        if in_a_row == WINDOW:
            return step
    return None


def test_a_run_collapses_at_the_last_of_ten_steps_whose_average_is_below_half():
    # the average is below half from step 25 on; half is not below half
    for lower, step in (([], None), ([0.0] * 14, None), ([0.0] * 15, 34), ([0.5] * 40, None)):
        assert collapse_step(HIGH + lower) == collapsed(HIGH + lower) == step
    found = set()
    for seed in range(200):
        rng = np.random.default_rng(seed)
        rewards = (rng.integers(0, 9, 80) * np.linspace(2, rng.choice([0, 1, 2]), 80) // 1).tolist()
        found.add(collapse_step(rewards))
        assert collapse_step(rewards) == collapsed(rewards), seed
    assert None in found
    assert len(found) > 10


def test_the_imbalance_of_contiguous_homes_by_hand():
    counts = np.array([[[4, 0, 2, 2], [1, 1, 1, 1]]])  # one micro-step, two layers, four experts
    assert contiguous_imbalance(counts, 2) == pytest.approx((1.0 + 1.0) / 2)
    # an empty cell is no barrier
    assert contiguous_imbalance(np.concatenate([counts, 0 * counts]), 4) == pytest.approx((2.0 + 1.0) / 2)
    assert contiguous_imbalance(0 * counts, 4) == 1
