"""Where sequences begin in a row, against counting by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreroute.errors import BatchMismatchError
from foreroute.layout import locate_rows, starts_from_cumulative_lengths, starts_from_positions
from tests.layout.canary import canary_trace
from tests.traces import spec_of


def canary(lengths):
    return canary_trace(lengths, spec_of(num_experts=64)).trace


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 9),
)
def test_packed_sequences_are_located(rows, left, extra, junk):
    """Rows of sequences, padded on one side, with anything for positions of padding."""
    width = max(map(sum, rows)) + extra
    trace = canary([length for row in rows for length in row])
    ids, kept, positions = (np.full((len(rows), width), value) for value in (0, False, junk))
    expected = np.full((len(rows), width), -1)
    row_of_trace = 0
    for b, row in enumerate(rows):
        at = width - sum(row) if left else 0
        for length in row:
            for p in range(length):
                ids[b, at], kept[b, at], positions[b, at] = trace.token_ids_N[row_of_trace], True, p
                expected[b, at] = row_of_trace
                at, row_of_trace = at + 1, row_of_trace + 1
    starts = starts_from_positions(positions, kept)
    assert np.array_equal(locate_rows(trace, ids, kept, starts), expected.reshape(-1))
    if len(rows) == 1 and kept.all():
        cumulative = np.concatenate([[0], np.cumsum(rows[0])])
        assert np.array_equal(starts_from_cumulative_lengths(cumulative, kept), starts)


def test_a_row_that_does_not_begin_at_position_0_is_one_sequence():
    assert starts_from_positions([[5, 6, 7, 0]], np.ones((1, 4), bool)).tolist() == [[True, False, False, True]]


def test_an_empty_sequence_is_none():
    kept = np.ones((1, 3), bool)
    assert starts_from_cumulative_lengths([0, 2, 2, 3], kept).tolist() == [[True, False, True]]


@pytest.mark.parametrize(
    ("cumulative", "shape", "message"),
    [
        ([0, 2], (1, 3), "run from 0 to 2; expected 0 to 3"),
        ([1, 3], (1, 3), "run from 1 to 3"),
        ([0, 3], (2, 3), "a batch of 2 rows"),
        ([0, 2, 1, 3], (1, 3), "none below the one before it"),
        ([0, 2**63 - 1, -(2**63), -1, 3], (1, 3), "none below the one before it"),
        ([0.0, 3.0], (1, 3), "expected integers"),
        ([], (1, 3), r"shape \(0,\)"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(cumulative, shape, message):
    with pytest.raises(BatchMismatchError, match=message):
        starts_from_cumulative_lengths(cumulative, np.ones(shape, bool))


def test_positions_of_another_shape_are_refused():
    with pytest.raises(BatchMismatchError, match=r"shape \(2, 3\); expected \(2, 4\)"):
        starts_from_positions(np.zeros((2, 3), int), np.ones((2, 4), bool))
    for starts in ([[0.5, 1]], [[True]], [[2, 0]]):
        with pytest.raises(BatchMismatchError, match=r"expected bool \(1, 2\)"):
            locate_rows(canary([2]), [[0, 1]], None, starts)
    with pytest.raises(BatchMismatchError, match="in no sequence"):
        locate_rows(canary([2]), [[0, 1]], None, [[False, True]])
