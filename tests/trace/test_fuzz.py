"""A seeded sample of what `python -m benchmarks fuzz` tries."""

import pytest

from benchmarks.fuzz import fuzz, targets


@pytest.mark.parametrize("number", range(3))
def test_malformed_trace_files(number, tmp_path):
    target = targets(tmp_path)[number]
    tally = fuzz(target, 1000, seed=7)
    assert tally.failures == []
    assert tally.refused > 900
