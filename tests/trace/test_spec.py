"""Facts of a model, given as numpy's integers and lists: kept as Python's own, so that every room takes them."""

import json

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import Generation, load_generation, save_generation
from foreroute.errors import TraceContentError
from foreroute.trace import SAMPLING, DecisionStream, IndexerSpec, digest

LAYERS = (fr.RoutedLayer(0), fr.RoutedLayer(2))
SPEC = fr.RoutingSpec(8, 2, LAYERS)
SETS = {"valid": [False, True, False], "counts": [0, 1, 0], "ids": [3]}
ROUTES = np.argsort(np.random.default_rng(0).random((2, 2, 8)))[..., :2]


def trace_of(spec, masks):
    return fr.RoutingTrace.from_sequences(spec, [[1, 2, 3]], [ROUTES]).with_stream(SAMPLING, masks)


@pytest.mark.parametrize(
    "spec",
    [
        fr.RoutingSpec(np.int64(8), np.uint8(2), LAYERS),
        fr.RoutingSpec(8, 2, list(LAYERS)),
        fr.RoutingSpec(8, 2, (fr.RoutedLayer(np.int32(0)), fr.RoutedLayer(np.int64(2)))),
    ],
    ids=["numpy's integers", "list of layers", "numpy's layer numbers"],
)
@pytest.mark.parametrize(
    "masks",
    [DecisionStream.from_sets(np.int64(50), **SETS), DecisionStream.absent(np.int64(50), 3)],
    ids=["sets", "absent"],
)
def test_numpys_integers_and_lists_are_taken_by_every_room(spec, masks, tmp_path):
    plain = trace_of(
        SPEC, DecisionStream.from_sets(50, **SETS) if masks.valid_N.any() else DecisionStream.absent(50, 3)
    )
    given = trace_of(spec, masks)
    assert digest(given) == digest(plain)
    assert fr.load(fr.save(given, tmp_path / "trace", encoding="ordered")).equals(given)
    SPEC.require_same(given.spec, what="the trace")
    save_generation(Generation(given, np.array([1]), np.zeros(2, np.float32)), tmp_path / "generation")
    assert load_generation(tmp_path / "generation").trace.equals(plain)


def test_a_stream_keeps_its_layers_as_a_tuple_however_it_was_made():
    made = DecisionStream.from_sets(9, [True], [[1, 1]], [3, 4], layers=iter(LAYERS))
    bare = DecisionStream(np.int16(9), made.valid_N, made.offsets, made.ids, list(LAYERS))
    assert bare.layers == made.layers == DecisionStream.absent(9, 1, layers=list(LAYERS)).layers == LAYERS
    one = fr.RoutingTrace.unrouted(SPEC, [[1]])
    assert one.with_stream("a", bare).equals(one.with_stream("a", made))


def test_indexers_given_as_lists_take_their_own_choices():
    spec = IndexerSpec(np.int64(1), list(LAYERS), np.int32(1), np.uint8(1))
    assert spec == IndexerSpec(1, LAYERS)
    assert json.dumps([spec.top_k, spec.unit, spec.heads]) == "[1, 1, 1]"
    counts_N, ids = np.array([1, 1]), np.array([0, 1], np.int32)
    spec.check(spec.stream(np.arange(2), [(counts_N, ids)] * 2), np.array([0, 2]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fr.RoutingSpec(8, 2, (0, 2)), r"layers are \(0, 2\); expected routed layers"),
        (lambda: fr.RoutingSpec(8, 2, fr.RoutedLayer(0)), "expected routed layers"),
        (lambda: fr.RoutingSpec(8, 2, None), "layers are None"),
        (lambda: fr.RoutingSpec(8.0, 2, LAYERS), "num_experts is 8.0"),
        (lambda: fr.RoutingSpec("8", 2, LAYERS), "num_experts is '8'"),
        (lambda: fr.RoutingSpec(8, 2.5, LAYERS), "top_k is 2.5"),
        (lambda: fr.RoutingSpec(8, True, LAYERS), "top_k is True"),
        (lambda: fr.RoutingSpec(8, 2, map(fr.RoutedLayer, range(1025))), "1025 layers of 8 experts"),
        (lambda: fr.RoutingSpec(65_536, 2, map(fr.RoutedLayer, range(17))), "1048576 experts in all"),
        (lambda: fr.RoutedLayer(-1, fr.trace.LayerKind.MTP), "layer"),
        (lambda: fr.RoutedLayer(2.5, fr.trace.LayerKind.MTP), "layer"),
        (lambda: fr.RoutedLayer(0, "decoder"), "layer"),
        (lambda: DecisionStream.absent(50, 3, layers=[1]), r"layers are \[1\]"),
        (lambda: DecisionStream.absent(50.0, 3), "num_choices is 50.0"),
        (lambda: IndexerSpec(3, ("a",)), "expected routed layers"),
        (lambda: IndexerSpec(0, LAYERS), "top_k is 0; expected a whole number from 1 to"),
        (lambda: IndexerSpec(3, LAYERS, unit=2.0), "unit is 2.0"),
        (lambda: IndexerSpec(3, LAYERS, heads=True), "heads is True"),
    ],
)
def test_what_is_no_fact_of_a_model_is_refused(make, message):
    with pytest.raises(TraceContentError, match=message):
        make()
