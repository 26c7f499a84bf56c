"""Every form, written byte for byte by code that knows nothing of the decoders, comes back as the known routes.

Rows without a route are told by -1, by zeros at the end of verl's batch, or as no row at all. The last token was
sampled and never fed: what stands for it in a capture is no route, whoever made it up.
"""

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import decode
from foreroute.errors import CaptureError
from tests import wires

RNG = np.random.default_rng(3)
R, SHORT, OTHER = (wires.rollout(RNG, prompt=p, response=g) for p, g in ((7, 5), (4, 3), (6, 4)))

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


@pytest.mark.parametrize("absent", [[0], [4], [3, 5, 10], list(range(10))])
def test_rows_of_zeros_before_a_routed_row_are_refused(absent):
    batch = wires.verl([R])
    batch["routed_experts"][0, absent] = 0
    with pytest.raises(CaptureError, match=rf"no route at position {absent[0]}, and one at position .*only at the end"):
        decode(batch, model=R.spec)


@pytest.mark.parametrize("absent", [[0], [4, 5], list(range(10))])
def test_a_row_of_minus_one_is_absent_whatever_the_form(absent):
    rows, batch = R.routes_RLK.astype(np.int64), wires.verl([R])
    rows[absent] = batch["routed_experts"][0, absent] = -1
    for output in (rows, rows.tolist(), batch):
        trace = decode(output, model=R.spec, token_ids=[R.tokens])
        assert np.flatnonzero(~trace.valid_N).tolist() == [*absent, 11]
        assert np.array_equal(trace.expert_ids_NLK[trace.valid_N], np.delete(R.routes_RLK, absent, axis=0))


MADE_UP = {
    "the first experts": np.tile(np.arange(3), (4, 1)),
    "the row before": R.routes_RLK[-1],
    "zeros": np.zeros((4, 3), int),
    "no ids": np.full((4, 3), 99),
    "-1 in part": np.full((4, 3), [-1, 2, 3]),
}


@pytest.mark.parametrize("row", MADE_UP.values(), ids=MADE_UP)
def test_a_row_for_the_last_token_is_no_route(row):
    """Nor when the caller says so."""
    rows = np.concatenate([R.routes_RLK, row[None]])
    for output in (rows, rows.tolist(), wires.npy(rows.astype("<i4")), [rows]):
        assert decode(output, model=R.spec, token_ids=[R.tokens]).equals(known(R))
    assert decode(rows, model=R.spec, token_ids=R.tokens, valid=np.ones(12, bool)).equals(known(R))


def test_an_aborted_choice_that_has_rows_is_read():
    """Those of the prompt, of which all but the last row produced a token of it."""
    text = wires.npy_text(SHORT.all_layers()[:3].astype(np.uint8))
    answer = wires.vllm_answer(SHORT, finish_reason="abort", token_ids=[], routed_experts=text)
    trace = decode(answer, model=SHORT.spec)
    assert trace.equals(
        known(SHORT).truncated([3]).continued_by(fr.RoutingTrace.unrouted(SHORT.spec, [SHORT.prompt[3:]]))
    )


def split(r, write, **changes):
    """As vLLM 0.21 answers: a row for each token of the prompt, and one for each sampled token but the last."""
    prompt, rows = r.routes_RLK[: len(r.prompt)], r.routes_RLK[len(r.prompt) :]
    answer = {"index": 0, "token_ids": r.response, "routed_experts": write(rows), **changes}
    return {"prompt_token_ids": r.prompt, "prompt_routed_experts": write(prompt), "choices": [answer]}


WRITERS = {
    "lists": np.ndarray.tolist,
    "arrays": lambda rows: rows.astype(np.int16),
    "base64": lambda rows: wires.npy_text(rows.astype(np.uint8)),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_routes_of_prompt_and_output_in_two_fields_are_joined(write):
    assert decode(split(SHORT, write), model=SHORT.spec).equals(known(SHORT))
    both = decode([split(SHORT, write), split(OTHER, write)], model=SHORT.spec)
    assert both.equals(fr.concatenate([known(SHORT), known(OTHER)]))
    moved = split(SHORT, write)
    moved["choices"][0]["prompt_routed_experts"] = moved.pop("prompt_routed_experts")
    assert decode(moved, model=SHORT.spec).equals(known(SHORT)), (
        "a proxy may put it into the choice, where vLLM does not"
    )


def test_fields_that_do_not_join_are_refused():
    for change, match in (
        ({"prompt_routed_experts": SHORT.routes_RLK[:3]}, r"\(3, 4, 3\) for a prompt of 4 tokens"),
        ({"prompt_routed_experts": SHORT.routes_RLK[:4, :3]}, r"\(2, 4, 3\) behind it"),
        ({"prompt_routed_experts": 5}, "routed_experts of choice 0 is a int"),
    ):
        with pytest.raises(CaptureError, match=match):
            decode(split(SHORT, np.ndarray.tolist) | change, model=SHORT.spec)
    alone = split(SHORT, np.ndarray.tolist)
    del alone["prompt_routed_experts"]
    with pytest.raises(CaptureError, match=r"2 rows .*prompt_routed_experts.*start="):
        decode(alone, model=SHORT.spec)
    with pytest.raises(CaptureError, match=r"5 rows for 7.*: pass start="):
        decode(split(SHORT, np.ndarray.tolist, routed_experts=SHORT.routes_RLK[4:5]), model=SHORT.spec)


@pytest.mark.parametrize("kind", [list, np.array])
def test_each_sequence_may_have_a_start_of_its_own(kind):
    answers = [wires.vllm_http(SHORT, 3), wires.vllm_http(OTHER, 1)]
    trace = decode(answers, model=SHORT.spec, start=kind([3, 1]))
    assert np.flatnonzero(trace.valid_N).tolist() == [*range(3, 6), *range(8, 16)]
