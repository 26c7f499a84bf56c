"""Random layouts against the oracle, by canaries, which name their place; batches located in a trace by tokens."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreroute import RoutedLayer, layout
from foreroute.errors import BatchMismatchError, LayoutError, SpecMismatchError
from foreroute.layout import locate_rows, starts_from_cumulative_lengths, starts_from_positions
from foreroute.layout.match_tokens import order_by_tokens
from foreroute.layout.rank_rows import block_homes, fill_padding
from tests.layout.layout_cases import canary_trace, decoded, draw_case
from tests.traces import random_trace, spec_of


def rows_of(planned):
    return planned.rows().packed_row_R.tolist()


def test_nothing_at_all_is_a_layout():
    assert rows_of(layout.pack([])) == []
    assert rows_of(layout.pack([]).align_total(8).split_context(2, 0).split_sequence(2, 1)) == []
    assert rows_of(layout.pad([], side="left", order="sbhd").split_sequence(4, 0)) == []
    assert rows_of(layout.pad([0, 0], side="left", order="sbhd")) == []


HALVES = [layout.pack([4]).split_context(2, rank).rows() for rank in range(2)]
TRACE = canary_trace([3], spec_of(num_experts=32))
IDS, HOMES = np.zeros((2, 1, 3), np.uint8), np.array([[0, 0, 1]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layout.pack([3, -1]), "lengths: sequence 1 has -1"),
        (lambda: layout.pack([3.5]), r"one integer.*sequence"),
        (lambda: layout.pack([3], align=0), "align is 0"),
        (lambda: layout.pack([2**63 - 1, 2**63 - 1, 7]), r"lengths add"),
        (lambda: layout.pack([3, 3], padded_lengths=[2**63 - 1, 2**62]), r"padded_lengths add"),
        (lambda: layout.pack([3] * 3, align=2**31 - 1), r"router rows.*add"),
        (lambda: layout.pad([3], side="top", order="bshd"), r"'left'.*'right'"),
        (lambda: layout.pad([3], side="left", order="thd"), "expected 'bshd'"),
        (lambda: layout.pad([3, 9], side="left", order="bshd", to=8), "sequence 1 has 9 tokens"),
        (lambda: layout.pad([3], side="left", order="bshd").align_total(8), "give `pad` a width `to`"),
        (lambda: layout.pack([4, 6]).split_context(2, 0), "sequence 1 of .* 6 router rows.*Give pack.align=. 4"),
        (lambda: layout.pad([6], side="left", order="bshd").split_context(2, 0), "Give pad.to=. 4"),
        (lambda: layout.pack([4]).align_total(6).split_context(2, 0), r"tail.*2 router rows"),
        (lambda: layout.pack([8]).split_context(2, 0).split_context(2, 0), "split_context comes before"),
        (lambda: layout.pack([5]).split_sequence(2, 0), r"5 router rows.*2 sequence-parallel"),
        (lambda: layout.collect([(HALVES[0], np.zeros(2))]), "row 1 arrived 0 times"),
        (lambda: layout.collect([(half, np.zeros(2)) for half in (*HALVES, HALVES[0])]), "row 0 arrived 2 times"),
        (lambda: layout.collect([(HALVES[0], np.zeros(3))]), "value.*router"),
        (lambda: layout.collect([]), "nothing.*collect"),
        (lambda: fill_padding(IDS, np.ones(2, bool), HOMES[0]), r"expected integers \[1 layers, experts\]"),
        (lambda: fill_padding(IDS, np.ones(2, bool), HOMES.repeat(2, axis=0)), r"expected integers \[1 layers, exp"),
        (lambda: fill_padding(IDS, np.ones(2, bool), HOMES * 0.9), r"expected integers \[1 layers, experts\]"),
        (lambda: fill_padding(IDS, np.ones(2, bool), HOMES[:, 1:]), "3 distinct picks.*2"),
        (lambda: fill_padding(IDS, np.ones(3, bool), HOMES), "bool.*2 router"),
        (lambda: fill_padding(IDS, np.array([0, 1]), HOMES), "bool.*2 router"),
        (lambda: block_homes(6, 4), "6 experts.*divide.*4"),
    ],
)
def test_what_cannot_be_laid_out_collected_or_filled_is_refused(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


def test_a_layout_of_other_rows_or_layers_is_refused():
    with pytest.raises(SpecMismatchError, match=r"routes.*decoder 9"):
        layout.take_routes(TRACE, layout.pack([3]).rows(), [RoutedLayer(9)])
    with pytest.raises(BatchMismatchError, match=r"4 packed.*trace.*3"):
        layout.take_routes(TRACE, layout.pack([4]).rows())


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.uint16), (512, np.uint16)])
def test_missing_routes_are_one_past_the_last_expert(num_experts, dtype):
    trace = canary_trace([2, 2], spec_of(num_experts=num_experts))
    rows = layout.pack(trace.lengths, align=3).rows()
    routes = layout.take_routes(trace, rows)
    assert routes.routed_R.tolist() == [True, False, False, True, False, False]
    assert routes.ids_RLK.dtype == dtype
    assert (routes.ids_RLK[~routes.routed_R] == num_experts).all()
    assert np.array_equal(routes.ids_RLK[routes.routed_R], trace.expert_ids_NLK[[0, 2]])
    assert layout.take_routes(trace, rows, []).ids_RLK.shape == (6, 0, 2)


@pytest.mark.parametrize("seed", range(25))
def test_padding_is_distinct_and_even_over_experts_and_ranks(seed):
    rng = np.random.default_rng(seed)
    ep, per_rank = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    num_experts = ep * per_rank
    top_k = int(rng.integers(1, num_experts + 1))
    blocks = block_homes(num_experts, ep)
    homes = np.stack([blocks if seed % 2 else rng.permutation(blocks) for _ in range(3)])
    ids = np.full((int(rng.integers(0, 40)), 3, top_k), num_experts, np.uint8)
    fill = rng.random(len(ids)) < 0.6
    filled = fill_padding(ids, fill, homes, start=int(rng.integers(0, 100)))
    assert np.array_equal(filled[~fill], ids[~fill])
    for layer in range(3):
        picks = filled[fill, layer]
        assert all(len(set(row)) == top_k for row in picks.tolist())
        loads = np.bincount(picks.reshape(-1), minlength=num_experts)
        assert loads.shape == (num_experts,)
        assert np.ptp(loads) <= 1
        assert np.ptp(np.bincount(homes[layer], weights=loads, minlength=ep)) <= 1


SEEDS, SHARDS = range(60), 4
"""Each form is among these with each side; with those of the slow tests, with each number of ranks too."""


@pytest.mark.parametrize(
    "seeds",
    [
        SEEDS,
        pytest.param(range(60, 180), marks=pytest.mark.slow),
        *(pytest.param(range(180 + n, 2400, SHARDS), marks=pytest.mark.exhaustive) for n in range(SHARDS)),
    ],
)
def test_every_rank_gets_the_rows_of_the_oracle_and_gives_them_back_in_packed_order(seeds):
    num_collected = 0
    for seed in seeds:
        case = draw_case(seed)
        canary = canary_trace(case.lengths, case.spec, last_absent=seed % 2 == 0)
        layers = case.spec.layers[seed % 3 :] or case.spec.layers
        plans = []
        for sequences in case.batches:
            for ranks in case.ranks():
                plans.append(case.plan(sequences, *ranks))
                expected = places(case, canary, case.expected(sequences, *ranks), layers)
                seen = seen_places(canary, plans[-1], layers)
                assert np.array_equal(seen, expected), (seed, case, sequences, ranks)
        if sorted(s for batch in case.batches for s in batch) == list(range(len(case.lengths))):
            collected = layout.collect([(each, each.packed_row_R * 7) for each in plans])
            assert collected.tolist() == [7 * n for n in range(sum(case.lengths))], seed
            num_collected += 1
    assert num_collected >= len(seeds) // 2


# The mistakes of integrations: each lays out the case, or the share of (context rank, sequence rank), otherwise.
MISTAKES = {
    "batch first for sequence first": lambda c, r: (replace(c, form="bshd" if c.form == "sbhd" else "sbhd"), r),
    "right for left padding": lambda c, r: (replace(c, side="left" if c.side == "right" else "right"), r),
    "context and sequence ranks swapped": lambda c, r: (c, r[::-1]),
    "another alignment": lambda c, r: (replace(c, align=2 * c.align), r),
    "sequences in another order": lambda c, r: (replace(c, batches=tuple(b[::-1] for b in c.batches)), r),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistaken_layout_is_seen(mistake):
    """Negative control: wherever a mistake moves a cell of the oracle, canaries tell the layouts apart."""
    moved = 0
    for seed in range(80):
        case = replace(draw_case(seed), cp=2, tp=2, align=8, total=(8, 2))
        case = replace(case, form="sbhd" if seed % 2 else case.form)
        wrong, wrong_ranks = MISTAKES[mistake](case, (1, 0))
        canary = canary_trace(case.lengths, case.spec, last_absent=False)
        for sequences, wrong_sequences in zip(case.batches, wrong.batches, strict=True):
            cells = case.expected(sequences, 1, 0)
            seen = seen_places(canary, wrong.plan(wrong_sequences, *wrong_ranks), case.spec.layers)
            is_right = cells == wrong.expected(wrong_sequences, *wrong_ranks)
            assert np.array_equal(seen, places(case, canary, cells, case.spec.layers)) == is_right, (seed, mistake)
            moved += not is_right
    assert moved >= 20, f"{mistake} moved cells in only {moved} layouts, which controls little"


def seen_places(canary, rank_rows, layers):
    """[R, L, 3], what a rank's routers would replay, decoded; the mask and the picks must agree on what is missing."""
    routes = layout.take_routes(canary, rank_rows, layers)
    places = decoded(canary, routes.ids_RLK)
    assert np.array_equal((places >= 0).all(axis=-1), np.broadcast_to(routes.routed_R[:, None], places.shape[:2]))
    return places


def places(case, canary, cells, layers):
    """[R, L, 3], the same from the oracle's cells."""
    columns = [case.spec.layers.index(layer) for layer in layers]
    listed = []
    for cell in cells:
        routed = cell is not None and bool(canary.valid_N[canary.offsets[cell[0]] + cell[1]])
        listed.append([(*cell, column) if routed else (-1, -1, -1) for column in columns])
    return np.array(listed, dtype=np.int64).reshape(len(cells), len(columns), 3)


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
        assert (found.tolist(), found.dtype) == (expected, np.int64), seed
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
        ([2], [[[0, 1, 77]]], r"3 tokens.*2 in.*attention mask"),
        ([2], [[[0, 1], [2, 3]]], r"2 sequences.*trace has 1"),
        ([2], [[[0.0, 1.0]]], r"expected integers \[B, T\]"),
        ([2], [[[0, 1]], [[1, 1, 1]]], "attention_mask has shape"),
        ([2], [[[0, 1]], [[1, 2]]], "0 and 1 alone"),
        ([2], [[[0, 9]]], "sequence 0, position 1.*9.*1"),
        ([2], [np.zeros((0, 2), int)], r"0 sequences.*trace has 1"),
        *(([2], [[[0, 1]], None, starts], "0 and 1 alone") for starts in ([[0.5, 1]], [[2, 0]])),
        ([2], [[[0, 1]], None, [[True]]], r"expected \(1, 2\)"),
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
        (starts_from_cumulative_lengths, [0, 2, 1, 3], (1, 3), r"none below.*before"),
        (starts_from_cumulative_lengths, [0, 2**63 - 1, -(2**63), -1, 3], (1, 3), r"none below.*before"),
        (starts_from_positions, np.zeros((2, 3), int), (2, 4), r"shape \(2, 3\); expected \(2, 4\)"),
    ],
)
def test_starts_that_do_not_fit_are_refused(starts_from, given, shape, message):
    with pytest.raises(BatchMismatchError, match=message):
        starts_from(given, np.ones(shape, bool))
