"""Ratios near 1: their interval holds the median as often as it says, and what is not resolved is no figure."""

import itertools

import pytest

from benchmarks.harness.pairs import median_interval


@pytest.mark.parametrize("n", [2, 5, 6, 8, 12])
def test_the_interval_holds_the_median_in_95_of_100_samples_and_no_narrower_one_does(n):
    held = inner_held = 0
    for sides in itertools.product((-1, 1), repeat=n):  # of a true median of 0, each as likely
        values = [side * (place + 1) for place, side in enumerate(sides)]
        interval = median_interval(values)
        if interval is None:
            held += min(values) <= 0 <= max(values)
            continue
        lower, upper = interval
        held += lower <= 0 <= upper
        inner = [value for value in values if lower < value < upper]
        inner_held += bool(inner) and min(inner) <= 0 <= max(inner)
    if n < 6:
        assert median_interval(range(n)) is None
        assert held < 0.95 * 2**n, "even all of the values miss it too often"
    else:
        assert held >= 0.95 * 2**n
        assert inner_held < 0.95 * 2**n
