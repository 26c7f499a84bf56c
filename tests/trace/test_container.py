"""Specs, and traces: built, compared and refused, also of layers that differ in experts and picks."""

from collections import Counter
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreroute as fr
from foreroute.errors import SpecMismatchError, TraceContentError
from foreroute.trace import NO_VERSION, SAMPLING, DecisionStream, IndexerSpec, digest, extended
from foreroute.trace.checks import check_rows
from foreroute.trace.operations import count_assignments, overlap
from tests.traces import picks_of, random_trace, spec_of, uneven_trace, with_decisions

SPEC = spec_of(num_experts=4, top_k=2, num_layers=1)


def test_digest_depends_on_tokens_routes_versions_and_every_stream():
    a = random_trace(0)
    assert digest(a) == digest(a.select(np.arange(len(a))))
    assert digest(a) == digest(a.with_provenance(engine="other"))
    changed = [a.with_weight_version(9), a.select(np.arange(len(a))[::-1])]
    tokens = a.token_ids_N.copy()
    tokens[0] += 1
    changed.append(fr.RoutingTrace(a.spec, a.expert_ids_NLK, a.valid_N, tokens, a.weight_versions_N, a.offsets))
    with_streams = with_decisions(a, 0)
    assert digest(with_streams) == digest(with_decisions(a, 0))
    changed += [with_streams, with_decisions(a, 1), *map(with_streams.without_streams, (SAMPLING, "indexer"))]
    assert len({digest(t) for t in [a, *changed]}) == 8


def test_facts_of_joined_traces_are_those_on_which_they_agree():
    a = random_trace(0)
    parts = [a.with_provenance(engine="x", day=day) for day in "121"]
    assert fr.concatenate(parts).provenance == a.provenance | {"engine": "x", "day": "1 | 2"}
    joined = fr.concatenate([fr.concatenate(parts[:2]), parts[0].with_provenance(day="3")])
    assert joined.provenance["day"] == "1 | 2 | 3"
    with pytest.raises(SpecMismatchError, match=r"16 experts instead.*8"):
        fr.concatenate([a, random_trace(0, num_experts=16)])


def test_ids_that_no_expert_has_are_not_counted():
    trace = random_trace(0)
    trace.expert_ids_NLK[np.flatnonzero(trace.valid_N)[-1], 0, 0] = trace.spec.num_experts
    with pytest.raises(TraceContentError, match=f"expert ids.*{trace.spec.num_experts}"):
        count_assignments(trace, np.zeros(len(trace), int))


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_row_with_an_id_twice_or_too_high_is_refused_and_no_other(seed):
    rng = np.random.default_rng(seed)
    spec, valid_N = spec_of(num_experts=300, top_k=3, num_layers=2), rng.random(6) < 0.7
    ids_NLK = np.argsort(rng.random((6, 2, 300)), axis=-1)[..., :3].astype(np.uint16)
    for row in rng.integers(0, 6, int(rng.integers(3))):
        ids_NLK[row, rng.integers(2), rng.integers(3)] = rng.choice([300, 65_535, ids_NLK[row, 0, 0]])
    bad = [n for n in np.flatnonzero(valid_N) if any(len(set(r)) < 3 or max(r) >= 300 for r in ids_NLK[n].tolist())]
    offsets = np.array([0, 2, 2, 6])
    if not bad:
        check_rows(ids_NLK, valid_N, offsets, spec)
        return
    named = f"sequence 0, position {bad[0]}" if bad[0] < 2 else f"sequence 2, position {bad[0] - 2}"
    with pytest.raises(TraceContentError, match=rf"{named}, decoder [01] .*ids \["):
        check_rows(ids_NLK, valid_N, offsets, spec)


@pytest.mark.parametrize(("experts", "layers"), [(8, 1), (127, 1), (128, 9), (129, 1), (255, 9), (256, 1)])
def test_each_pair_and_each_place_of_eight_picks_is_looked_at(experts, layers):
    """Eight picks of a byte are checked as one word, and eight layers at once."""
    spec = spec_of(num_experts=experts, top_k=8, num_layers=layers)
    good = np.tile(np.arange(experts - 8, experts, dtype=np.uint8), (1, layers, 1))
    row = np.ones(1, bool), np.array([0, 1]), spec
    check_rows(good, *row)
    too_high = [(place, experts) for place in range(8) if experts < 256]
    for place, value in [(a, good[0, 0, b]) for a, b in permutations(range(8), 2)] + too_high:
        bad = good.copy()
        bad[0, -1, place] = value
        with pytest.raises(TraceContentError, match=r"expert ids"):
            check_rows(bad, *row)


SIZES = ((8, 2), (6, 3), (8, 1))
UNEVEN = fr.RoutingSpec.of_sizes(map(fr.RoutedLayer, range(3)), SIZES)
ROW = [[0, 7, -1], [5, 0, 3], [6, -1, -1]]


@st.composite
def traces(draw):
    """A trace of a model with other experts and picks in some layers, at both sides of each width of ids."""
    experts = draw(st.lists(st.sampled_from([1, 3, 255, 256, 257, 300]), min_size=1, max_size=4))
    sizes = [(num_experts, draw(st.integers(1, min(num_experts, 4)))) for num_experts in experts]
    return uneven_trace(draw(st.integers(0, 2**32 - 1)), sizes)


def uneven_of(*rows, spec=UNEVEN, dtype=np.int64):
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


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint8, np.uint16])
def test_routes_come_in_with_minus_one_behind_the_picks_in_types_without_a_sign_too(dtype):
    assert picks_of(uneven_of(ROW, dtype=dtype)) == [[[0, 7], [5, 0, 3], [6]]]
    assert uneven_of(ROW, dtype=dtype).expert_ids_NLK[0].tolist() == [[0, 7, 255], [5, 0, 3], [6, 255, 255]]


GOOD = {"token_ids": [[1, 2]], "expert_ids": [[[[0, 1]], [[0, 0]]]], "valid": [[True, False]]}
GOOD["weight_versions"] = [[3, 2**40]]  # of an absent row: not looked at
LAYERS = (fr.RoutedLayer(0), fr.RoutedLayer(2))


def with_ids(ids):
    return lambda: fr.RoutingTrace.from_sequences(SPEC, [[1, 2]], [ids])


def with_rows(**changed):
    return lambda: fr.RoutingTrace.from_rows(SPEC, **GOOD | changed)


def done(use):
    return lambda: use(random_trace(0))


def with_sizes(*sizes):
    return lambda: fr.RoutingSpec.of_sizes(UNEVEN.layers, sizes)


REFUSED = [
    # routes and rows
    (with_ids([[[0, 0]]]), "picked twice"),
    (with_ids([[[0, 4]]]), "expected 0 to 3"),
    (with_ids([[[0, -1]]]), "expected 0 to 3"),
    (with_ids([[[0.0, 1.0]]]), "expected integers"),
    (with_ids([[[0, 1, 2]]]), "expected \\[rows"),
    (with_ids([[[0, 1]]] * 3), r"2 tokens.*shape \(3, 1, 2\)"),
    (with_rows(weight_versions=[[2**32 + 5, 0]]), "from 5 to|from 0 to 4294967301"),
    (with_rows(weight_versions=[[1.5, 0]]), r"weight_versions\[0\] is float64"),
    (with_rows(valid=[[0.3, 0]]), r"valid\[0\] is float64.*expected bools"),
    *((with_rows(token_ids=[ids]), r"integers \[T\] from 0") for ids in ([-1, 2], [1.5, 2.0], [2**31, 1], [[1], [2]])),
    (with_rows(token_ids=[[[1], [2, 3]]]), r"read.*array"),
    (with_rows(expert_ids=[[[[0, 1]], [[0]]]]), r"read.*array"),
    (with_rows(valid=[[True, True]], expert_ids=[[[[0, 1]]]]), r"one row.*every token"),
    (with_rows(expert_ids=[]), r"of \[0, 1\] sequences"),
    # parts of a trace
    (done(lambda trace: trace.select([len(trace)])), r"sequences.*\d+.*numbers.*0"),
    (done(lambda trace: trace.select([-1, 0])), "sequences hold -1"),
    (done(lambda trace: trace.select(np.ones(len(trace), bool))), r"numpy\.flatnonzero"),
    *((done(lambda trace, wrong=wrong: trace.select(wrong)), "seq") for wrong in ([0.5], ["0"], [None], [[0], [0, 1]])),
    (done(lambda trace: trace.truncated(trace.lengths + 1)), "lengths hold"),
    # facts of a model
    (lambda: fr.RoutingSpec(8, 2, (0, 2)), r"\(0, 2\); .*routed layers"),
    (lambda: fr.RoutingSpec(8, 2, fr.RoutedLayer(0)), r"expected.*routed layers"),
    (lambda: fr.RoutingSpec(8.0, 2, LAYERS), "num_experts is 8.0"),
    (lambda: fr.RoutingSpec(8, 2.5, LAYERS), "top_k is 2.5"),
    (lambda: fr.RoutingSpec(8, 2, map(fr.RoutedLayer, range(1025))), "1025 layers of 8 experts"),
    (lambda: fr.RoutingSpec(65_536, 2, map(fr.RoutedLayer, range(17))), r"1048576 experts"),
    (lambda: fr.RoutedLayer(-1, fr.trace.LayerKind.MTP), "layer"),
    (lambda: fr.RoutedLayer(2.5, fr.trace.LayerKind.MTP), "layer"),
    (lambda: DecisionStream.absent(50, 3, layers=[1]), r"layers are \[1\]"),
    (lambda: DecisionStream.absent(50.0, 3), "num_choices is 50.0"),
    (lambda: IndexerSpec(0, LAYERS), r"top_k is 0; .*whole number"),
    (lambda: IndexerSpec(3, LAYERS, unit=2.0), "unit is 2.0"),
    # of layers that differ
    (with_sizes((8, 2), (3, 4), (8, 4)), "top_k of a layer is 4"),
    (with_sizes((8, 2), (8.0, 1), (8, 2)), "num_experts of a layer is 8.0"),
    (with_sizes((8, 2), (8, 1)), r"sizes.*2 layers"),
    (lambda: replace(UNEVEN, top_k=4), "up to"),
    (lambda: uneven_of(ROW, [[0, 7, 0], *ROW[1:]]), r"columns.*expected -1 behind"),
    (lambda: uneven_of(ROW, [ROW[0], [5, 6, 3], ROW[2]]), r"decoder 1 .*\[5, 6, 3\].*0 to 5"),
    (lambda: uneven_of(ROW, [[4, 4, -1], *ROW[1:]]), r"decoder 0 .*\[4, 4\].*twice"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_is_refused(make, message):
    assert fr.RoutingTrace.from_rows(SPEC, **GOOD).weight_versions_N.tolist() == [3, NO_VERSION]
    with pytest.raises(TraceContentError, match=message):
        make()
