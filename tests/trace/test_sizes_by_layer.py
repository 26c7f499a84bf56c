"""Layers that differ in experts and picks, beside lists of picks; no filler counts as an expert."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreroute as fr
from foreroute.errors import TraceContentError
from foreroute.trace import extended
from foreroute.trace.operations import count_assignments, overlap
from tests.traces import picks_of, uneven_trace

SIZES = ((8, 2), (6, 3), (8, 1))
SPEC = fr.RoutingSpec.of_sizes(map(fr.RoutedLayer, range(3)), SIZES)
ROW = [[0, 7, -1], [5, 0, 3], [6, -1, -1]]


@st.composite
def traces(draw):
    """A trace of a model with other experts and picks in some layers, at both sides of each width of ids."""
    experts = draw(st.lists(st.sampled_from([1, 3, 255, 256, 257, 300]), min_size=1, max_size=4))
    sizes = [(num_experts, draw(st.integers(1, min(num_experts, 4)))) for num_experts in experts]
    return uneven_trace(draw(st.integers(0, 2**32 - 1)), sizes)


def trace_of(*rows, spec=SPEC, dtype=np.int64):
    return fr.RoutingTrace.from_sequences(spec, [range(len(rows))], [np.array(rows).astype(dtype)])


@settings(max_examples=60)
@given(trace=traces(), data=st.data())
def test_layers_and_padded_batches_match_lists(trace, data):
    rows, spec = picks_of(trace), trace.spec
    at = data.draw(st.permutations(range(spec.num_layers)))[: data.draw(st.integers(1, spec.num_layers))]
    part = trace.select_layers([spec.layers[i] for i in at])
    assert picks_of(part) == [None if row is None else [row[i] for i in at] for row in rows]
    assert part.spec == fr.RoutingSpec.of_sizes(part.spec.layers, [spec.sizes_L[i] for i in at], "test")
    assert part.expert_ids_NLK.dtype == part.spec.id_dtype
    ascending = trace.without_pick_order()
    assert picks_of(ascending) == [None if row is None else [sorted(ids) for ids in row] for row in rows]
    padded, version = trace.to_padded(), max([-1, *trace.versions])
    for mask in (padded.attention_mask_BT, trace.lengths):
        ids, routes = padded.token_ids_BT, padded.expert_ids_BTLK
        assert fr.RoutingTrace.from_padded(spec, ids, routes, mask, weight_version=version).equals(trace)
    flat = padded.expert_ids_BTLK[padded.attention_mask_BT]
    assert [[ids[ids >= 0].tolist() for ids in row] if row is not None else None for row in flat] == [
        [[]] * spec.num_layers if row is None else row for row in rows
    ]
    assert picks_of(extended(trace.truncated(trace.lengths // 2), trace)) == rows


@settings(max_examples=60)
@given(trace=traces(), data=st.data())
def test_only_picks_are_counted_and_shared(trace, data):
    rows, spec = picks_of(trace), trace.spec
    other = uneven_trace(data.draw(st.integers(0, 99)), spec.sizes_L)
    ids = np.where(trace.valid_N[:, None, None], spec.filler, 0) * np.ones((1, *spec.is_pick_LK.shape), int)
    for n, there in enumerate(trace.valid_N):
        if there and other.valid_N.any():
            ids[n] = other.expert_ids_NLK[np.flatnonzero(other.valid_N)[n % other.valid_N.sum()]]
        elif there:
            ids[n] = trace.expert_ids_NLK[n]
    other = replace(trace, expert_ids_NLK=ids.astype(spec.id_dtype))
    pairs = [(a, b) for a, b in zip(rows, picks_of(other), strict=True) if a is not None]
    shared = [[len({*x} & {*y}) for x, y in zip(a, b, strict=True)] for a, b in pairs]
    shared_RL, rows_R = overlap(trace, other)
    assert shared_RL.tolist() == shared
    assert rows_R.tolist() == np.flatnonzero(trace.valid_N).tolist()
    counted = Counter((layer, e) for row in rows if row for layer, picks in enumerate(row) for e in picks)
    counts_LE = count_assignments(trace, [0] * len(trace)).sum(axis=0)
    assert counts_LE.shape == (spec.num_layers, spec.num_experts)
    assert {(int(i), int(e)): int(counts_LE[i, e]) for i, e in np.argwhere(counts_LE)} == counted
    assert counts_LE.sum() == trace.valid_N.sum() * spec.picks_L.sum()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([(8, 2), (3, 4), (8, 4)], "top_k of a layer is 4"),
        ([(8, 2), (8.0, 1), (8, 2)], "num_experts of a layer is 8.0"),
        ([(8, 2), (8, 1)], "there are sizes of 2 layers"),
    ],
)
def test_layers_that_cannot_be_are_refused(sizes, message):
    with pytest.raises(TraceContentError, match=message):
        fr.RoutingSpec.of_sizes(SPEC.layers, sizes)
    with pytest.raises(TraceContentError, match="up to"):
        replace(SPEC, top_k=4)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint8, np.uint16])
def test_routes_come_in_with_minus_one_behind_the_picks_in_types_without_a_sign_too(dtype):
    assert picks_of(trace_of(ROW, dtype=dtype)) == [[[0, 7], [5, 0, 3], [6]]]
    assert trace_of(ROW, dtype=dtype).expert_ids_NLK[0].tolist() == [[0, 7, 255], [5, 0, 3], [6, 255, 255]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([[0, 7, 0], *ROW[1:]], "ids in columns that a layer does not have, .*expected -1 behind its picks"),
        ([ROW[0], [5, 6, 3], ROW[2]], r"decoder 1 has expert ids \[5, 6, 3\]: expected ids from 0 to 5"),
        ([[4, 4, -1], *ROW[1:]], r"decoder 0 has expert ids \[4, 4\]: an expert is picked twice"),
    ],
)
def test_routes_that_cannot_be_are_refused_by_the_sizes_of_their_layer(row, message):
    with pytest.raises(TraceContentError, match=message):
        trace_of(ROW, row)
