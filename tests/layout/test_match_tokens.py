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


@pytest.mark.parametrize("seed", range(30))
def test_any_mask_equals_a_loop(seed):
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


def test_the_unrouted_last_token_may_be_left_out_and_no_other():
    trace = canary([3, 3])
    assert locate_rows(trace, [[0, 1], [3, 4]]).tolist() == [0, 1, 3, 4]
    with pytest.raises(BatchMismatchError, match=r"sequence 0.*1.*3 tokens.*1"):
        locate_rows(trace, [[0], [3]])
    assert order_by_tokens(canary([2, 1]), [np.zeros(0, int), np.array([0])]).tolist() == [1, 0]


def test_padding_without_its_mask_is_refused_with_a_word_about_it():
    for ids in ([[9, 9, 9, 0, 1, 2], [9, 9, 9, 9, 3, 4]], [[0, 1, 2, 8, 8], [3, 4, 8, 8, 8]]):
        with pytest.raises(BatchMismatchError, match=r"attention.mask"):
            locate_rows(canary([3, 2]), ids)


def test_another_order_is_named():
    trace = canary([3, 3, 2])
    with pytest.raises(BatchMismatchError, match=r"holds.*sequences \[1, 0, 2\]"):
        locate_rows(trace, [[3, 4, 5], [0, 1, 2], [6, 7, 0]], [[1, 1, 1], [1, 1, 1], [1, 1, 0]])
    with pytest.raises(BatchMismatchError, match=r"2 sequences.*trace.*3.*\[2, 1\]"):
        locate_rows(trace, [[6, 0], [3, 4]], [[1, 0], [1, 1]])


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[0, 1, 77]], None, "3 tokens in the batch and 2 in the trace.*pass the attention mask"),
        ([[0, 1], [2, 3]], None, "2 sequences and the trace has 1"),
        ([[0.0, 1.0]], None, r"expected integers \[B, T\]"),
        ([[0, 1]], [[1, 1, 1]], "attention_mask has shape"),
        ([[0, 1]], [[1, 2]], "of zeros and ones"),
        ([[0, 9]], None, "sequence 0, position 1.*9.*1"),
        (np.zeros((0, 2), int), None, "0 sequences .* the trace has 1"),
    ],
)
def test_batches_that_are_not_the_traces_are_refused(ids, mask, message):
    with pytest.raises(BatchMismatchError, match=message):
        locate_rows(canary([2]), ids, mask)


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
    ("cumulative", "shape", "message"),
    [
        ([0, 2], (1, 3), "run from 0 to 2; expected 0 to 3"),
        ([0, 3], (2, 3), "a batch of 2 rows"),
        ([0, 2, 1, 3], (1, 3), "none below the one before it"),
        ([0, 2**63 - 1, -(2**63), -1, 3], (1, 3), "none below the one before it"),
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
    with pytest.raises(BatchMismatchError, match="sequence"):
        locate_rows(canary([2]), [[0, 1]], None, [[False, True]])
