"""Routes written for other frameworks: read back by the decoders, and equal to the independent writers' bytes."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreroute as fr
from benchmarks.harness import wires
from foreroute.capture import WRITABLE, ModelFacts, WireKind, decode, encode
from foreroute.errors import CaptureError
from tests.traces import random_trace, spec_of


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(WRITABLE),
    experts=st.sampled_from([4, 128, 129, 256, 300]),
    dense=st.booleans(),
)
def test_what_is_written_is_read_back(seed, kind, experts, dense):
    trace = random_trace(seed, num_experts=experts, top_k=3, num_layers=3)
    trace = trace.select(np.flatnonzero(trace.lengths > 1))
    layers = 5 if dense else None
    for s, payload in enumerate(encode(trace, kind, num_hidden_layers=layers)):
        one = trace.select([s])
        json.dumps(payload)
        read = decode(
            payload,
            model=ModelFacts(trace.spec, layers),
            token_ids=[one.token_ids_N],
            weight_version=max(one.versions),
        )
        assert read.equals(one)


def test_the_bytes_are_those_of_the_frameworks():
    r = wires.rollout(np.random.default_rng(0), experts=300, dense=1, layers=4)
    trace = fr.RoutingTrace.from_sequences(r.facts.spec, [r.tokens], [r.routes_RLK])
    written = {kind: encode(trace, kind, num_hidden_layers=5)[0] for kind in WRITABLE}
    assert written[WireKind.NPY] == json.loads(wires.vllm_http(r))["choices"][0]["routed_experts"]
    assert written[WireKind.RAW_INT32] == json.loads(wires.sglang(r))["meta_info"]["routed_experts"]
    assert written[WireKind.PRIME_RL] == json.loads(wires.prime_rl(r))
    assert written[WireKind.SKYRL]["shape"] == json.loads(wires.skyrl(r))["shape"]
    head, tail = encode(trace, WireKind.NEMO_RL)[0].split("x", 1)
    theirs = wires.nemo_rl(r).split("x", 1)
    assert (head, tail[:20]) == (f"nrlre1:int16:{len(r.routes_RLK)}", theirs[1][:20])


def with_a_gap(top_k=2):
    spec = spec_of(num_experts=4, top_k=top_k, num_layers=2)
    ids = np.argsort(np.random.default_rng(0).random((4, 2, 4)), axis=-1)[..., :top_k]
    valid = np.array([True, False, True, False])
    versions = [np.where(valid, 3, -1)]
    return fr.RoutingTrace.from_rows(spec, [[1, 2, 3, 4]], [ids], valid=[valid], weight_versions=versions)


@pytest.mark.parametrize("kind", [WireKind.NEMO_RL, WireKind.SKYRL])
def test_gaps_survive_where_the_form_can_say_so(kind):
    trace = with_a_gap()
    (payload,) = encode(trace, kind)
    read = decode(payload, model=trace.spec, token_ids=[trace.token_ids_N], weight_version=3)
    assert read.equals(trace)


def test_gaps_are_refused_where_it_cannot():
    for kind in (WireKind.NPY, WireKind.RAW_INT32, WireKind.PRIME_RL):
        with pytest.raises(CaptureError, match="no route at position 1, which"):
            encode(with_a_gap(), kind)
    with pytest.raises(CaptureError, match="no route at position 1"):
        encode(with_a_gap(top_k=1), WireKind.PRIME_RL)


def test_forms_that_are_only_read_are_named():
    with pytest.raises(CaptureError, match=r"cannot be written as lmdeploy; choose one of npy, raw-int32"):
        encode(random_trace(0), WireKind.LMDEPLOY)
