"""Every form, written byte for byte by code that knows nothing of the decoders, comes back as the known routes.

Rows without a route are told by -1, by zeros at the end of verl's batch, or as no row at all. The last token was
sampled and never fed: what stands for it in a capture is no route, whoever made it up. Zeros of layers that look
experts up by token, which engines leave out, were not recorded.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import foreroute as fr
from foreroute.capture import decode
from foreroute.errors import CaptureError
from foreroute.trace import LayerKind
from foreroute.trace.operations import with_lookups
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
    with pytest.raises(CaptureError, match=rf"no route.*{absent[0]}, and one.*only.*end"):
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
    last = fr.RoutingTrace.unrouted(SHORT.spec, [SHORT.prompt[3:]])
    assert trace.equals(known(SHORT).truncated([3]).continued_by(last))


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
    assert decode(moved, model=SHORT.spec).equals(known(SHORT)), "a proxy may put it there, and vLLM does not"


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


@pytest.mark.parametrize("container", [list, np.array])
def test_each_sequence_may_have_a_start_of_its_own(container):
    answers = [wires.vllm_http(SHORT, 3), wires.vllm_http(OTHER, 1)]
    trace = decode(answers, model=SHORT.spec, start=container([3, 1]))
    assert np.flatnonzero(trace.valid_N).tolist() == [*range(3, 6), *range(8, 16)]


TYPES = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
SIZES = [(16, 3), (128, 8), (200, 8), (256, 8), (300, 8), (300, 1)]
LAYOUTS = {
    "C": np.ascontiguousarray,
    "F": np.asfortranarray,
    "every second row": lambda rows: np.repeat(rows, 2, axis=0)[::2],
    "from the end": lambda rows: np.ascontiguousarray(rows[::-1])[::-1],
    "big-endian": lambda rows: rows.astype(rows.dtype.newbyteorder(">")),
    "flat": lambda rows: rows.reshape(len(rows), -1),
}
INDICES = {"neighbours": (1, 2, 3), "apart": (1, 3, 4)}  # of routed layers among five


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_decode_takes_the_rows_that_python_picks(data, seed):
    rng, draw = np.random.default_rng(seed), data.draw
    experts, top_k = draw(st.sampled_from(SIZES))
    indices = draw(st.sampled_from(list(INDICES.values())))
    spec = fr.RoutingSpec(experts, top_k, tuple(map(fr.RoutedLayer, indices)))
    dtype = draw(st.sampled_from([each for each in TYPES if np.iinfo(each).max >= experts - 1]))
    start, count = draw(st.integers(0, 4)), draw(st.integers(1, 9))
    rows = np.argsort(rng.random((count, 3, experts)), axis=-1)[..., :top_k]
    # one pick without a sign has no -1, and of a model without a choice zeros may be a failed capture
    is_missing = (rng.random(count) < 0.3) & (top_k > 1)
    valid = rng.random(count) < draw(st.sampled_from([0.5, 1.0]))
    if draw(st.booleans()):
        # the last three would be experts in a narrower type
        wrongs = experts, rows[0, 0, 0], 1 << 8, 1 << 16, (1 << 16) - (1 << 32)
        bounds = np.iinfo(dtype)
        wrong = draw(st.sampled_from([each for each in wrongs if bounds.min <= each <= bounds.max]))
        rows[draw(st.integers(0, count - 1)), draw(st.integers(0, 2)), draw(st.integers(0, top_k - 1))] = wrong
    is_routed = valid & ~is_missing
    is_wrong = [
        len({*ids}) < top_k or max(ids) >= experts or min(ids) < 0 for row in rows[is_routed].tolist() for ids in row
    ]
    given = rows.copy()
    given[is_missing] = -1
    if draw(st.booleans()):  # all layers
        given = np.insert(given, np.searchsorted(indices, np.setdiff1d(np.arange(5), indices)), 0, axis=1)
    given = LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](given.astype(dtype))
    tokens = np.arange(start + count + 1)

    def read():
        return decode(given, model=spec, token_ids=tokens, valid=valid, start=start)

    if any(is_wrong) or not is_routed.any():
        with pytest.raises(CaptureError):
            read()
        return
    trace = read()
    assert trace.valid_N.tolist() == [False] * start + is_routed.tolist() + [False]
    assert trace.expert_ids_NLK.dtype == spec.id_dtype
    assert trace.expert_ids_NLK.tolist() == [
        row if there else np.zeros((3, top_k), int).tolist()
        for row, there in zip([None] * start + rows.tolist() + [None], trace.valid_N, strict=True)
    ]


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


LOOKING = rollout()
WHOLE = fr.RoutingTrace.from_sequences(SPEC, [LOOKING.tokens], [LOOKING.routes_RLK])


@pytest.mark.parametrize("writer", [wires.vllm_http, wires.sglang, lambda r: wires.verl([r]), lambda r: r.routes_RLK])
@pytest.mark.parametrize("layers", [HASH, [0], [2]])
def test_their_zeros_are_left_out_and_the_rest_is_kept(writer, layers):
    trace = decode(writer(without(LOOKING, layers)), model=SPEC, token_ids=[LOOKING.tokens])
    assert trace.equals(WHOLE.select_layers([layer for i, layer in enumerate(LAYERS) if i not in layers]))
    assert with_lookups(trace, SPEC, LOOKUPS).equals(WHOLE)


def test_zeros_elsewhere_and_a_row_of_them_are_refused():
    with pytest.raises(CaptureError, match=r"zeros in 3 of 5 layers .first: hash 0"):
        decode(without(LOOKING, [0, 1, 2]).routes_RLK, model=SPEC, token_ids=LOOKING.tokens)
    with pytest.raises(CaptureError, match="zeros in 5 of 5 layers"):
        decode(without(LOOKING, range(5)).routes_RLK, model=SPEC, token_ids=LOOKING.tokens)
    rows = LOOKING.routes_RLK.copy()
    rows[4, 0] = 0
    with pytest.raises(CaptureError, match=r"position 4.*0.*expert.*0, 0, 0"):
        decode(rows, model=SPEC, token_ids=LOOKING.tokens)
