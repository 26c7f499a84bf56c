"""Every wire, written byte for byte by code that knows nothing of the decoders, comes back as the known routes."""

import base64
import io
import json

import numpy as np
import pytest

import foreroute as fr
from benchmarks.harness import wires
from foreroute.capture import ModelFacts, WireKind, decode, recognise

RNG = np.random.default_rng(3)

# wire -> (writer, expected kind, arguments that the wire does not carry)
CARRIES_TOKENS = {
    "vllm int32": (wires.vllm_int32, WireKind.VLLM),
    "vllm narrow": (wires.vllm_narrow, WireKind.VLLM),
    "vllm split": (wires.vllm_split, WireKind.VLLM_SPLIT),
    "vllm split json": (wires.vllm_split_json, WireKind.VLLM_SPLIT),
    "vllm http": (wires.vllm_http, WireKind.VLLM_NPY),
    "tensorrt": (wires.tensorrt_llm, WireKind.VLLM),
}
NEEDS_TOKENS = {
    "sglang": (wires.sglang, WireKind.SGLANG),
    "sglang openai": (wires.sglang_openai, WireKind.SGLANG),
    "sglang-jax": (wires.sglang_jax, WireKind.SGLANG_JAX),
    "lmdeploy": (lambda r: wires.lmdeploy(r, np.random.default_rng(0)), WireKind.LMDEPLOY),
    "nemo": (wires.nemo_rl, WireKind.NEMO_RL),
    "prime": (wires.prime_rl, WireKind.PRIME_RL),
    "skyrl": (wires.skyrl, WireKind.SKYRL),
    "lists": (lambda r: r.routes_RLK.tolist(), WireKind.LISTS),
    "json lists": (lambda r: json.dumps(r.routes_RLK.tolist()), WireKind.LISTS),
    "array": (lambda r: r.routes_RLK, WireKind.ARRAY),
    "npy": (lambda r: wires.npy(r.all_layers().astype("<u2")), WireKind.NPY),
    "npy base64": (lambda r: base64.b64encode(wires.npy(r.all_layers())).decode(), WireKind.NPY),
    "raw": (lambda r: base64.b64encode(r.all_layers().astype("<i4").tobytes()).decode(), WireKind.RAW_INT32),
}
OF_ONE_ENGINE = {
    WireKind(name) for name in ("vllm", "vllm-split", "vllm-npy", "sglang", "sglang-jax", "tensorrt-llm", "lmdeploy")
}
MODELS = [
    {},
    {"experts": 128, "top_k": 8, "layers": 5, "dense": 3},
    {"experts": 512, "top_k": 10, "layers": 2, "dense": 0},
    {"experts": 300, "top_k": 1, "layers": 3, "dense": 1, "prompt": 40, "response": 30},
    {"prompt": 1, "response": 1},
]


def known(r, **kwargs):
    return fr.RoutingTrace.from_sequences(r.facts.spec, [r.tokens], [r.routes_RLK], **kwargs)


@pytest.mark.parametrize("shape", MODELS)
@pytest.mark.parametrize("name", [*CARRIES_TOKENS, *NEEDS_TOKENS])
def test_round_trip(name, shape):
    r = wires.rollout(RNG, **shape)
    writer, kind = {**CARRIES_TOKENS, **NEEDS_TOKENS}[name]
    output = writer(r)
    tokens = r.tokens if name in NEEDS_TOKENS else None
    version = {"engine_version": "9"} if kind in OF_ONE_ENGINE else {}
    trace = decode(output, model=r.facts, token_ids=tokens, weight_version=4, **version)
    assert trace.equals(known(r, weight_version=4))
    assert trace.provenance == {"wire": kind.value, **version}
    assert recognise(output).kind is kind


@pytest.mark.parametrize("writer", [wires.vllm_int32, wires.vllm_narrow, wires.vllm_http])
def test_rows_before_the_start_are_absent(writer):
    r = wires.rollout(RNG)
    trace = decode(writer(r, 5), model=r.facts, start=5)
    assert trace.valid_N.tolist() == [False] * 5 + [True] * 6 + [False]
    assert np.array_equal(trace.expert_ids_NLK[5:11], r.routes_RLK[5:])
    assert set(trace.expert_ids_NLK[:5].ravel().tolist()) == {0}


@pytest.mark.parametrize("writer", [wires.sglang, wires.sglang_openai])
def test_sglang_start_len_comes_from_the_caller(writer):
    r = wires.rollout(RNG)
    trace = decode(writer(r, 4), model=r.facts, start=4, token_ids=r.tokens)
    assert trace.valid_N.tolist() == [False] * 4 + [True] * 7 + [False]


def test_prime_rl_states_its_start():
    r = wires.rollout(RNG)
    assert decode(wires.prime_rl(r, 3), model=r.facts, token_ids=r.tokens).valid_N.sum() == 8


def test_nemo_sentinel_rows_are_gaps():
    r = wires.rollout(RNG)
    absent = np.zeros(12, bool)
    absent[[0, 4, 5]] = True
    trace = decode(wires.nemo_rl(r, absent), model=r.facts, token_ids=r.tokens)
    assert np.flatnonzero(~trace.valid_N).tolist() == [0, 4, 5, 11]


def test_verl_batch_drops_padding_and_marks_zero_rows():
    a, b = wires.rollout(RNG), wires.rollout(RNG, prompt=3, response=9)
    batch = wires.verl([a, b])
    batch["routed_experts"][1, 4 + 9 :] = 0  # rows that its agent loop did not fill: an answer of a tool
    trace = decode(batch, model=a.facts)
    assert trace.tokens(0).tolist() == a.tokens
    assert trace.tokens(1).tolist() == b.tokens
    assert np.flatnonzero(~trace.valid_N).tolist() == [11, 12 + 9, 12 + 10, 12 + 11]
    assert trace.select([0]).equals(known(a))


def test_numpy_writes_the_header_that_is_read():
    r = wires.rollout(RNG)
    for array in (r.all_layers().astype(np.uint8), np.asfortranarray(r.all_layers().astype(np.uint16))):
        file = io.BytesIO()
        np.save(file, array, allow_pickle=False)
        assert decode(file.getvalue(), model=r.facts, token_ids=r.tokens).equals(known(r))


def test_every_choice_and_every_output_is_a_sequence():
    r, other = wires.rollout(RNG), wires.rollout(RNG, response=9)
    one, two = wires.vllm_narrow(r), wires.vllm_narrow(other)
    two.prompt_token_ids, two.outputs[0].token_ids = r.prompt, other.tokens[len(r.prompt) :]
    one.outputs = [*one.outputs, *two.outputs]
    trace = decode([one, wires.vllm_narrow(r)], model=r.facts)
    assert trace.lengths.tolist() == [12, 16, 12]
    assert recognise([one, one]).num_sequences == 4


def test_engine_name_settles_what_the_container_does_not():
    r = wires.rollout(RNG)
    assert decode(wires.tensorrt_llm(r), model=r.facts, engine="tensorrt-llm").provenance["wire"] == "tensorrt-llm"
    meta = json.loads(wires.sglang_jax(r))["choices"][0]
    jax = decode({"meta_info": meta}, model=r.facts, token_ids=r.tokens, engine="sglang-jax")
    assert jax.provenance["wire"] == "sglang-jax"
    assert jax.equals(known(r))


def test_advertised_dtype_is_used():
    r = wires.rollout(RNG)
    text = base64.b64encode(r.all_layers().astype(np.uint8).tobytes()).decode()
    meta = {"routed_experts": text, "routed_experts_dtype": "uint8", "routed_experts_start_len": 0}
    assert decode({"meta_info": meta}, model=r.facts, token_ids=r.tokens).equals(known(r))


def test_moe_only_axis_needs_no_layer_count():
    r = wires.rollout(RNG)
    assert decode(wires.tensorrt_llm(r), model=r.facts.spec).equals(known(r))


def test_split_wire_may_have_a_row_for_the_last_token():
    r = wires.rollout(RNG)
    output = wires.vllm_split(r)
    output.outputs[0].routed_experts = np.concatenate([output.outputs[0].routed_experts, r.routes_RLK[:1]])
    assert decode(output, model=r.facts).equals(known(r))


def test_gemma_style_interleaved_dense_layers():
    layers = tuple(fr.RoutedLayer(i) for i in (1, 3, 5))
    facts = ModelFacts(fr.RoutingSpec(16, 3, layers), num_hidden_layers=6)
    base = wires.rollout(RNG, layers=3, dense=0)
    r = wires.Rollout(facts, base.prompt, base.response, base.routes_RLK)
    assert decode(wires.vllm_http(r), model=facts).equals(known(r))
