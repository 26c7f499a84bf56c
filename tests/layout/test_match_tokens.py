"""Locating a batch in a trace by its tokens, and where sequences begin in a packed row, against counting by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreroute.errors import BatchMismatchError
from foreroute.layout import locate_rows, starts_from_cumulative_lengths, starts_from_positions
from foreroute.layout.match_tokens import order_by_tokens
from tests.layout.layout_cases import canary_trace
from tests.traces import random_trace, spec_of


def canary(lengths):
    return canary_trace(lengths, spec_of(num_experts=64))


def test_any_mask_equals_a_loop():
    for seed in range(30):
        rng = np.random.default_rng(seed)
        trace = random_trace(seed)
        width = int(trace.lengths.max()) + int(rng.integers(0, 4))
        ids, mask, expected = np.full((len(trace), width), 77), np.zeros((len(trace), width), int), []
        for b, (row, length) in enumerate(zip(trace.offsets.tolist(), trace.lengths.tolist(), strict=False)):
            mask[b] = rng.permutation([1] * length + [0] * (width - length))
            ids[b, mask[b] == 1] = trace.tokens(b)
            for t in range(width):
                expected.append(row if mask[b, t] else -1)
                row += int(mask[b, t])
        found = locate_rows(trace, ids, mask)
        assert (found.tolist(), found.dtype) == (expected, np.int64)
        assert np.array_equal(locate_rows(trace, ids.astype(np.int32), mask.astype(bool)), found)


def test_the_unrouted_last_token_may_be_left_out():
    assert locate_rows(canary([3, 3]), [[0, 1], [3, 4]]).tolist() == [0, 1, 3, 4]
    assert order_by_tokens(canary([2, 1]), [np.zeros(0, int), np.array([0])]).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("lengths", "given", "message"),
    [
        ([3, 3], [[[0], [3]]], "sequence 0.*1.*3 tokens.*1"),
        ([3, 2], [[[9, 9, 9, 0, 1, 2], [9, 9, 9, 9, 3, 4]]], "attention.mask"),
        ([3, 2], [[[0, 1, 2, 8, 8], [3, 4, 8, 8, 8]]], "attention.mask"),
        ([3, 3, 2], [[[3, 4, 5], [0, 1, 2], [6, 7, 0]], [[1] * 3, [1] * 3, [1, 1, 0]]], r"sequences \[1, 0, 2\]"),
        ([3, 3, 2], [[[6, 0], [3, 4]], [[1, 0], [1, 1]]], r"2 sequences.*trace.*3.*\[2, 1\]"),
        ([2], [[[0, 1, 77]]], "3 tokens in the batch and 2 in the trace.*pass the attention mask"),
        ([2], [[[0, 1], [2, 3]]], "2 sequences and the trace has 1"),
        ([2], [[[0.0, 1.0]]], r"expected integers \[B, T\]"),
        ([2], [[[0, 1]], [[1, 1, 1]]], "attention_mask has shape"),
        ([2], [[[0, 1]], [[1, 2]]], "of zeros and ones"),
        ([2], [[[0, 9]]], "sequence 0, position 1.*9.*1"),
        ([2], [np.zeros((0, 2), int)], "0 sequences .* the trace has 1"),
        *(([2], [[[0, 1]], None, starts], r"expected bool \(1, 2\)") for starts in ([[0.5, 1]], [[True]], [[2, 0]])),
        ([2], [[[0, 1]], None, [[False, True]]], "sequence"),
    ],
)
def test_batches_that_are_not_the_traces_are_refused(lengths, given, message):
    with pytest.raises(BatchMismatchError, match=message):
        locate_rows(canary(lengths), *given)


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


@pytest.mark.parametrize(
    ("starts_from", "given", "shape", "message"),
    [
        (starts_from_cumulative_lengths, [0, 2], (1, 3), "run from 0 to 2; expected 0 to 3"),
        (starts_from_cumulative_lengths, [0, 3], (2, 3), "a batch of 2 rows"),
        (starts_from_cumulative_lengths, [0, 2, 1, 3], (1, 3), "none below the one before it"),
        (starts_from_cumulative_lengths, [0, 2**63 - 1, -(2**63), -1, 3], (1, 3), "none below the one before it"),
        (starts_from_positions, np.zeros((2, 3), int), (2, 4), r"shape \(2, 3\); expected \(2, 4\)"),
    ],
)
def test_starts_that_do_not_fit_are_refused(starts_from, given, shape, message):
    with pytest.raises(BatchMismatchError, match=message):
        starts_from(given, np.ones(shape, bool))
