"""Corners of layouts, layouts that cannot be, and the routes that a rank takes by them, with padding filled evenly."""

import numpy as np
import pytest

from foreroute import RoutedLayer, layout
from foreroute.errors import BatchMismatchError, LayoutError, SpecMismatchError
from foreroute.layout.rank_rows import block_homes, fill_padding
from tests.layout.layout_cases import canary_trace
from tests.traces import spec_of


def rows_of(planned):
    return planned.rows().packed_row_R.tolist()


def test_nothing_at_all_is_a_layout():
    assert rows_of(layout.pack([])) == []
    assert rows_of(layout.pack([]).align_total(8).split_context(2, 0).split_sequence(2, 1)) == []
    assert rows_of(layout.pad([], side="left", order="sbhd").split_sequence(4, 0)) == []
    assert rows_of(layout.pad([0, 0], side="left", order="sbhd")) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layout.pack([3, -1]), "lengths: sequence 1 has -1"),
        (lambda: layout.pack([3.5]), "expected one integer per sequence"),
        (lambda: layout.pack([3], align=0), "align is 0"),
        (lambda: layout.pack([2**63 - 1, 2**63 - 1, 7]), "lengths add up to"),
        (lambda: layout.pack([3, 3], padded_lengths=[2**63 - 1, 2**62]), "padded_lengths add up to"),
        (lambda: layout.pack([3] * 3, align=2**31 - 1), "router rows add up to"),
        (lambda: layout.pad([3], side="top", order="bshd"), "expected 'left' or 'right'"),
        (lambda: layout.pad([3], side="left", order="thd"), "expected 'bshd'"),
        (lambda: layout.pad([3, 9], side="left", order="bshd", to=8), "sequence 1 has 9 tokens"),
        (lambda: layout.pad([3], side="left", order="bshd").align_total(8), "give `pad` a width `to`"),
        (
            lambda: layout.pack([4, 6]).split_context(2, 0),
            "sequence 1 of the batch has 6 router rows.*Give pack.align=. 4",
        ),
        (lambda: layout.pad([6], side="left", order="bshd").split_context(2, 0), "Give pad.to=. 4"),
        (lambda: layout.pack([4]).align_total(6).split_context(2, 0), "the tail of the line has 2 router rows"),
        (lambda: layout.pack([8]).split_context(2, 0).split_context(2, 0), "split_context comes before"),
        (lambda: layout.pack([5]).split_sequence(2, 0), "5 router rows do not divide over 2 sequence-parallel ranks"),
    ],
)
def test_impossible_layouts_are_refused(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


def test_collect_refuses_missing_and_repeated_ranks():
    halves = [layout.pack([4]).split_context(2, r).rows() for r in range(2)]
    values = np.zeros(2)
    with pytest.raises(LayoutError, match="row 1 arrived 0 times"):
        layout.collect([(halves[0], values)])
    with pytest.raises(LayoutError, match="row 0 arrived 2 times"):
        layout.collect([(halves[0], values), (halves[1], values), (halves[0], values)])
    with pytest.raises(LayoutError, match=r"value.*router"):
        layout.collect([(halves[0], np.zeros(3))])
    with pytest.raises(LayoutError, match=r"nothing.*collect"):
        layout.collect([])


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.uint16), (512, np.uint16)])
def test_missing_routes_are_one_past_the_last_expert(num_experts, dtype):
    trace = canary_trace([2, 2], spec_of(num_experts=num_experts))
    routes = layout.take_routes(trace, layout.pack(trace.lengths, align=3).rows())
    assert routes.routed_R.tolist() == [True, False, False, True, False, False]
    assert routes.ids_RLK.dtype == dtype
    assert (routes.ids_RLK[~routes.routed_R] == num_experts).all()
    assert np.array_equal(routes.ids_RLK[routes.routed_R], trace.expert_ids_NLK[[0, 2]])


def test_a_layout_of_other_rows_or_layers_is_refused():
    trace = canary_trace([3], spec_of(num_experts=32))
    rows = layout.pack(trace.lengths).rows()
    assert layout.take_routes(trace, rows, []).ids_RLK.shape == (3, 0, 2)
    with pytest.raises(SpecMismatchError, match=r"routes.*decoder 9"):
        layout.take_routes(trace, rows, [RoutedLayer(9)])
    with pytest.raises(BatchMismatchError, match=r"4 packed.*trace.*3"):
        layout.take_routes(trace, layout.pack([4]).rows())


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


def test_impossible_fills_are_refused():
    ids = np.zeros((2, 1, 3), np.uint8)
    homes = np.array([[0, 0, 1]])
    for wrong in (homes[0], homes.repeat(2, axis=0), homes * 0.9):
        with pytest.raises(LayoutError, match=r"expected integers \[1 layers, experts\]"):
            fill_padding(ids, np.ones(2, bool), wrong)
    with pytest.raises(LayoutError, match=r"3 distinct picks.*2"):
        fill_padding(ids, np.ones(2, bool), homes[:, 1:])
    with pytest.raises(LayoutError, match=r"bool.*2 router"):
        fill_padding(ids, np.ones(3, bool), homes)
    with pytest.raises(LayoutError, match=r"bool.*2 router"):
        fill_padding(ids, np.array([0, 1]), homes)
    with pytest.raises(LayoutError, match=r"6 experts.*divide.*4"):
        block_homes(6, 4)
