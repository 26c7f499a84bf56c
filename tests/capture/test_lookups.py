"""Layers that look experts up by token (the kind `hash`), which engines leave out: zeros there were not recorded."""

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import decode
from foreroute.errors import CaptureError
from foreroute.trace import LayerKind
from foreroute.trace.operations import with_lookups
from tests import wires

RNG = np.random.default_rng(17)
HASH = (0, 2)
LAYERS = tuple(fr.RoutedLayer(i, LayerKind.HASH if i in HASH else LayerKind.DECODER) for i in range(5))
SPEC = fr.RoutingSpec(16, 3, LAYERS)
DECODER = SPEC.select([layer for layer in LAYERS if layer.kind is LayerKind.DECODER])
TABLE = np.argsort(RNG.random((50_000, 16)), axis=-1)[:, :3]
LOOKUPS = {LAYERS[i]: lambda tokens, i=i: (TABLE[tokens] + i) % 16 for i in HASH}


def rollout(**sizes):
    """A request whose lookup layers follow the table."""
    r = wires.rollout(RNG, layers=5, dense=0, **sizes)
    for layer in HASH:
        r.routes_RLK[:, layer] = LOOKUPS[LAYERS[layer]](np.array(r.tokens[:-1]))
    return wires.Rollout(SPEC, 5, r.prompt, r.response, r.routes_RLK)


def without(r, layers=HASH):
    rows = r.routes_RLK.copy()
    rows[:, list(layers)] = 0
    return wires.Rollout(SPEC, 5, r.prompt, r.response, rows)


R = rollout()
WHOLE = fr.RoutingTrace.from_sequences(SPEC, [R.tokens], [R.routes_RLK])


@pytest.mark.parametrize("writer", [wires.vllm_http, wires.sglang, lambda r: wires.verl([r]), lambda r: r.routes_RLK])
@pytest.mark.parametrize("layers", [HASH, [0], [2]])
def test_their_zeros_are_left_out_and_the_rest_is_kept(writer, layers):
    trace = decode(writer(without(R, layers)), model=SPEC, token_ids=[R.tokens])
    assert trace.equals(WHOLE.select_layers([layer for i, layer in enumerate(LAYERS) if i not in layers]))
    assert with_lookups(trace, SPEC, LOOKUPS).equals(WHOLE)


def test_zeros_elsewhere_and_a_row_of_them_are_refused():
    with pytest.raises(CaptureError, match=r"zeros in 3 of 5 layers .first: hash 0"):
        decode(without(R, [0, 1, 2]).routes_RLK, model=SPEC, token_ids=R.tokens)
    with pytest.raises(CaptureError, match="zeros in 5 of 5 layers"):
        decode(without(R, range(5)).routes_RLK, model=SPEC, token_ids=R.tokens)
    rows = R.routes_RLK.copy()
    rows[4, 0] = 0
    with pytest.raises(CaptureError, match=r"position 4.*0.*expert.*0, 0, 0"):
        decode(rows, model=SPEC, token_ids=R.tokens)
