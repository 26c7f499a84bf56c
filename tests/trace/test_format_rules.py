"""Every rule of docs/trace-format.md that binds a reader: a file that breaks one is refused, right seals or not."""

import numpy as np
import pytest

import foreroute as fr
from foreroute.errors import TraceContentError, TraceFileError
from foreroute.trace.check import as_offsets, ascending, segment_rows
from forging import STAIRCASE, forged, setting
from traces import random_trace


def staircase(end):
    return np.array([*STAIRCASE, end], np.int64)


@pytest.mark.parametrize("sequences", [None, [0], [1], [3]])
def test_run_offsets_whose_differences_wrap_are_refused(tmp_path, sequences):
    trace = random_trace(0)
    runs = len(trace)
    path = forged(tmp_path / "t", trace, setting(run_offsets=staircase(runs)))
    with pytest.raises(TraceFileError, match="run_offsets do not go from 0 to the number of runs"):
        fr.load(path, sequences=sequences)


def test_offsets_are_compared_and_not_subtracted():
    assert ascending(np.array([0, 0, 3, 3]), 3)
    for wrong in (staircase(3), np.array([0, 3, 1, 3]), np.array([1, 3]), np.array([0, 2]), np.zeros(0, np.int64)):
        assert not ascending(wrong, 3)
    assert not ascending(np.array([0.0, 3.0]), 3)
    assert not ascending(np.array([[0, 3]]), 3)


def test_lengths_whose_sum_wraps_are_refused():
    for lengths in ([2**63 - 1, 2**63 - 1, 7], [3, -1], [2**62, 2**62]):
        with pytest.raises(TraceContentError, match="lengths"):
            as_offsets(np.array(lengths, np.int64))
        with pytest.raises(TraceContentError, match="lengths"):
            segment_rows(np.zeros(len(lengths), np.int64), np.array(lengths, np.int64))
