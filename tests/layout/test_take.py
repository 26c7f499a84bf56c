"""Routes of a rank: what is missing stays visible, and padding is filled legally and evenly, on request."""

import numpy as np
import pytest

from foreroute import RoutedLayer, layout
from foreroute.errors import BatchMismatchError, LayoutError, SpecMismatchError
from foreroute.layout.rank_rows import block_homes, fill_padding
from tests.layout.layout_cases import canary_trace
from tests.traces import spec_of


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


@pytest.mark.parametrize("seed", range(50))
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
