"""Ratios near 1: their interval holds the median as often as it says, and what is not resolved is no figure."""

import itertools

import pytest

from benchmarks.harness.pairs import RESOLUTION, compare, median_interval, near_one


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


class Machine:
    """Its clock moves only by what runs on it."""

    def __init__(self):
        self.seconds = 0.0

    def running(self, seconds):
        given = itertools.cycle(seconds)

        def run():
            self.seconds += next(given)

        return run

    def compared(self, seconds, pairs):
        return compare(self.running(seconds), self.running([1.0]), pairs=pairs, clock=lambda: self.seconds)


def test_the_time_of_a_candidate_stands_over_that_of_the_baseline():
    found = Machine().compared([1.25], pairs=7)
    assert (found.ratio, found.low, found.high, found.lower, found.upper) == pytest.approx([1.25] * 5)
    assert (found.baseline_ms, found.pairs) == (pytest.approx(1000), 7)
    assert found.shown() == {"median": 1.25, "lower": 1.25, "upper": 1.25}
    assert Machine().compared([1.25], pairs=5).shown() == {"median": 1.25, "lower": None, "upper": None}


def test_few_pairs_or_a_wide_interval_resolve_nothing():
    expected = {"step_ratio": 1.003, "step_interval": [1.003, 1.003], "step_quartiles": [1.003, 1.003]}
    assert near_one("step", Machine().compared([1.003], pairs=6)) == expected
    figures = near_one("step", Machine().compared([1.12], pairs=5))
    assert (figures["step_ratio"], figures["step_interval"]) == (None, None)
    assert figures["step_reason"] == "not resolved: a 95 % interval takes six pairs, and these are 5"
    figures = near_one("step", Machine().compared([1.0, 1.001 + RESOLUTION], pairs=8))
    assert (figures["step_ratio"], figures["step_interval"]) == (None, [1.0, 1.021])
    assert figures["step_reason"] == "not resolved: 8 pairs leave a 95 % interval of 1.000 to 1.021"
    assert near_one("step", Machine().compared([1.0, 0.999 + RESOLUTION], pairs=8))["step_ratio"] is not None
