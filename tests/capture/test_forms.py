"""Every form, written byte for byte by code that knows nothing of the decoders, comes back as the known routes."""

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import decode
from tests import wires

RNG = np.random.default_rng(3)

# name -> (writer, its form, whether it carries the tokens)
FORMS = {
    "vllm int32": (wires.vllm_int32, "vllm", True),
    "vllm narrow": (wires.vllm_narrow, "vllm", True),
    "vllm http": (wires.vllm_http, "vllm", True),
    "sglang": (wires.sglang, "sglang", False),
    "sglang openai": (wires.sglang_openai, "sglang", False),
    "verl": (lambda r: wires.verl([r]), "verl", True),
    "routed layers": (lambda r: r.routes_RLK, "array", False),
    "all layers": (lambda r: r.all_layers().astype(np.uint16), "array", False),
    "constant in dense layers": (lambda r: r.all_layers(-1), "array", False),
    "npy": (lambda r: wires.npy(r.all_layers().astype("<u2")), "array", False),
}
MODELS = [
    {},
    {"experts": 128, "top_k": 8, "layers": 5, "dense": 3},
    {"experts": 512, "top_k": 10, "layers": 2, "dense": 0},
    {"experts": 300, "top_k": 1, "layers": 3, "dense": 1, "prompt": 40, "response": 30},
    {"prompt": 1, "response": 1},
]


def known(r, **kwargs):
    return fr.RoutingTrace.from_sequences(r.spec, [r.tokens], [r.routes_RLK], **kwargs)


# in verl's batch a row of zeros of a top-1 model may be expert 0 or no route: refused, see test_refusals
CASES = [(name, shape) for name in FORMS for shape in MODELS if not (name == "verl" and shape.get("top_k") == 1)]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_round_trip(name, shape):
    r = wires.rollout(RNG, **shape)
    writer, form, has_tokens = FORMS[name]
    tokens = None if has_tokens else r.tokens
    trace = decode(writer(r), model=r.spec, token_ids=tokens, weight_version=4)
    assert trace.equals(known(r, weight_version=4))
    assert trace.provenance == {"wire": form}


def test_verl_batch_drops_padding_and_marks_zero_rows():
    a, b = wires.rollout(RNG), wires.rollout(RNG, prompt=3, response=9)
    batch = wires.verl([a, b])
    batch["routed_experts"][1, 4 + 9 :] = 0  # rows that its agent loop did not fill: an answer of a tool
    trace = decode(batch, model=a.spec)
    assert trace.tokens(0).tolist() == a.tokens
    assert trace.tokens(1).tolist() == b.tokens
    assert np.flatnonzero(~trace.valid_N).tolist() == [11, 12 + 9, 12 + 10, 12 + 11]
    assert trace.select([0]).equals(known(a))


def test_every_choice_and_every_output_is_a_sequence():
    r, other = wires.rollout(RNG), wires.rollout(RNG, response=9)
    one, two = wires.vllm_narrow(r), wires.vllm_narrow(other)
    two.prompt_token_ids, two.outputs[0].token_ids = r.prompt, other.tokens[len(r.prompt) :]
    one.outputs = [*one.outputs, *two.outputs]
    assert decode([one, wires.vllm_narrow(r)], model=r.spec).lengths.tolist() == [12, 16, 12]
    arrays = decode([r.routes_RLK, other.routes_RLK], model=r.spec, token_ids=[r.tokens, other.tokens])
    assert arrays.equals(fr.concatenate([known(r), known(other)]))
    texts = decode([wires.vllm_http(r).encode(), wires.vllm_http(other)], model=r.spec)
    assert texts.equals(arrays)
