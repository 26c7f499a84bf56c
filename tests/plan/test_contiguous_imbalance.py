"""Rank load under contiguous placement, by hand."""

import numpy as np
import pytest

from foreroute.errors import InputError
from foreroute.plan import contiguous_imbalance


def test_by_hand():
    counts = np.array([[[4, 0, 2, 2], [1, 1, 1, 1]]])  # one micro-step, two layers, four experts
    assert contiguous_imbalance(counts, 2) == pytest.approx((1.0 + 1.0) / 2)
    assert contiguous_imbalance(counts, 4) == pytest.approx((2.0 + 1.0) / 2)


def test_one_hot_expert_costs_a_factor_of_the_ranks_and_empty_cells_nothing():
    counts = np.zeros((2, 1, 8), np.int64)
    counts[0, 0, 3] = 17
    assert contiguous_imbalance(counts, 8) == 8
    assert contiguous_imbalance(np.zeros((2, 1, 8), np.int64), 8) == 1


def test_uneven_placements_are_refused():
    with pytest.raises(InputError, match="6 experts cannot be placed evenly on 4 ranks"):
        contiguous_imbalance(np.zeros((1, 1, 6), np.int64), 4)
