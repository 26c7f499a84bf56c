"""What is refused: malformed routes at every door that can carry them, damaged answers, and values of any kind."""

import base64
import json
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import decode
from foreroute.errors import CaptureError
from tests import wires

RNG = np.random.default_rng(5)
R = wires.rollout(np.random.default_rng(5))
OTHER = wires.rollout(np.random.default_rng(6), prompt=6, response=4)
ALL = R.all_layers()
"""[11, 5, 3]: 11 rows of 12 tokens, and a dense layer before four that route."""


def refused(output, match, **given):
    with pytest.raises(CaptureError, match=match):
        decode(output, **{"model": R.spec, "token_ids": R.tokens} | given)


def base64_of(data):
    return base64.b64encode(data).decode()


def in_process(rows):
    output = wires.vllm_narrow(R)
    output.outputs[0].routed_experts = rows
    return output


def over_http(rows):
    return json.dumps(wires.vllm_answer(R, routed_experts=base64_of(wires.npy(rows))))


def raw(text):
    return {"meta_info": {"routed_experts": text}}


def verl(rows):
    wide = np.zeros((1, len(R.tokens), *rows.shape[1:]), rows.dtype)
    wide[0, : len(rows)] = rows
    return wires.verl([R]) | {"routed_experts": wide}


def table(rows, **more):
    return {"data": base64_of(rows.tobytes()), "shape": rows.shape, "dtype": str(rows.dtype), **more}


TYPED = {"array": np.asarray, "npy": wires.npy, "table": table, "vllm": in_process, "http": over_http, "verl": verl}
"""Doors whose rows keep their type."""
DOORS = TYPED | {"lists": np.ndarray.tolist, "sglang": lambda rows: raw(base64_of(rows.astype("<i4").tobytes()))}


def edited(where, value):
    rows = ALL.copy()
    rows[where] = value
    return rows


TWICE = r"position 3, decoder 2 .*\[4, 4, 1\].*picked twice"
MALFORMED = {
    "zeros": (ALL * 0, r"zeros in 4 of 4 layers .*enforce_eager|no row.*output.*route"),
    "a layer of zeros": (edited(np.s_[:, 2], 0), r"zeros in 1 of 4 layers .first: decoder 2."),
    "an expert twice": (edited(np.s_[3, 2], [4, 4, 1]), TWICE),
    "an expert too many": (edited(np.s_[3, 2, 0], 16), "from 0 to 16; expected 0 to 15.*physical ids"),
    "a layer of -1": (edited(np.s_[3, 2], -1), "from -1 to 15; expected 0 to 15.*, or bytes"),
    "a pick of -1": (edited(np.s_[3, 2, 1], -1), r"ids from -1 .*not filled.*never routed.*-1"),
    "a dense layer": (edited(np.s_[:, 0], [1, 2, 3]), r"decoder layer 0, .*dense"),
    "a layer more": (np.concatenate([ALL, ALL[:, 2:3]], 1), r"decoder layer 5, .*dense.*MTP layer"),
    **{f"{n} layers": (ALL[:, :n], f"have {n} layers; expected 4 .*, or all .*, 5 or more") for n in (1, 2, 3)},
    "other picks": (ALL[..., :2], r"2 picks.*top_k = 3|440 bytes.*shape"),
    "too few rows": (ALL[:10], r"10 rows for 12 tokens.*expected 11.*missing|600 bytes.*shape"),
    "too many rows": (np.concatenate([ALL, ALL[:2]]), r"13 rows for 12.*too many|780 bytes.*shape"),
    "the last row": (np.concatenate([ALL, ALL[:1]]), r"12 rows for 12.*too many|720 bytes|routes for.*last tok"),
}
UNTOLD = {("too few rows", "verl"), ("too many rows", "verl")} | {
    ("the last row", d) for d in ("array", "npy", "table", "lists")
}
"""What a batch cannot hold, and what routes alone may have: see test_forms.py."""


@pytest.mark.parametrize(("malformed", "door"), [(m, d) for m in MALFORMED for d in DOORS if (m, d) not in UNTOLD])
def test_malformed_routes_are_refused_at_every_door(malformed, door):
    assert decode(DOORS[door](ALL), model=R.spec, token_ids=R.tokens).valid_N.sum() == 11  # the control
    rows, match = MALFORMED[malformed]
    refused(DOORS[door](rows), match)


@pytest.mark.parametrize(("experts", "dtype"), [(300, "uint8"), (257, "uint8"), (129, "int8"), (300, "int8")])
@pytest.mark.parametrize("door", TYPED)
def test_ids_of_a_type_that_is_too_narrow_for_the_model(door, experts, dtype):
    """Each row is possible: two ids, which are those of the model less 256."""
    r = wires.rollout(RNG, experts=experts, top_k=2, dense=0)
    words = rf"ids of {dtype}.*{experts} experts apart.*uint"
    tokens = None if door in ("vllm", "http", "verl") else R.tokens
    refused(TYPED[door](r.all_layers().astype(dtype)), words, model=r.spec, token_ids=tokens)


def pick(value):
    rows = R.routes_RLK.tolist()
    rows[1][2][0] = value
    return rows


def choice(**changes):
    return wires.vllm_answer(R, **changes)["choices"][0]


ABORTED = choice(finish_reason="abort", routed_experts=None, token_ids=[])
ROWS = np.zeros((1, 2, 3), np.uint8)
NO_MASKS = np.ones((1, 12)), np.full((1, 12), 2), np.arange(12)[None] != 4
A_TABLE = r"base64, .*axes.*int8"
NO_NPY = r"version 1.*integer array"
DAMAGED = [
    # without routes
    ({"choices": [choice(), choice(routed_experts=None)]}, r"choice 1.*no routed_experts in \['finish_"),
    ({"error": {"message": "no tokenizer, " * 9, "code": 400}}, r"error.*engine: '(no tokenizer, ){9}';"),
    ([{"choices": [choice()]}, {"choices": [ABORTED]}], "output 1: choice 0 was aborted .*reason abort.*; leave it"),
    ([wires.sglang(R), {"meta_info": {"finish_reason": {"type": "abort"}}}], r"output 1: the.*aborted"),
    (SimpleNamespace(status_code=200, json=dict), r"response.*HTTP library"),
    ("k05VTVBZ*", r"routes are.*not base64"),
    *((each, rf"is {each}.*empty") for each in (None, {})),
    ({"meta_info": {}}, r"no routed_experts.*; start.*engine"),
    # of no form, or of two
    ("{", r"been cut.*not JSON"),
    ('data: {"choices": []}\n\ndata: [DONE]', "JSON.*without `stream`"),
    ([], r"list.*empty"),
    ({"choices": []}, "no choices"),
    ({"choices": [], "error": {"message": "boom"}}, "engine: 'boom'"),
    (b"\xff\xfe\x00", r"not text.*UTF-8"),
    (np.zeros((2, 3, 4, 2), int), r"padding: RoutingTrace\.from_padded"),
    ([raw(""), ROWS], "mix forms .array, sglang."),
    ({"routed_experts": ROWS[None], "input_ids": ROWS[0]}, "lacks position_ids"),
    *((wires.verl([R]) | {"attention_mask": mask}, "attention_mask") for mask in NO_MASKS),
    # text and bytes
    *((raw(text), "not base64") for text in ("AAAA*AAA", "AAAAA", "AAAA\nAAAA")),
    *((wires.npy(ROWS.astype(dtype)), NO_NPY) for dtype in (np.float32, object, ">i4")),
    (wires.npy(ROWS)[:-1], "which is 6 bytes; 5 bytes follow"),
    (wires.npy(ROWS).replace(b"(1, 2, 3)", b"(999999999999, 999999999999, 9)"), "npy file"),
    # arrays and nested lists
    (np.zeros((11, 4, 3)), "dtype float64"),
    (np.zeros((11, 13), int), r"shape \(11, 13\); expected .rows.*picks., or"),
    (pick("abc"), r"lists.*str"),
    (pick(True), r"lists.*bool; expected.*numbers"),
    (pick(1 << 70), r"dtype object.*integers"),
    # tables
    ({"routed_experts": {"data": "", "shape": [], "dtype": ""}}, r"table.*'', ''.*shape .*base64"),
    *((table(R.routes_RLK) | {"shape": [11, 4, axis]}, A_TABLE) for axis in (-3, True)),
    (table(R.routes_RLK) | {"shape": [11, 4]}, r"1056 bytes.*\[11, 4\] is 352"),
    (table(R.routes_RLK, start="x"), r"start of.*is 'x'"),
]


@pytest.mark.parametrize(("output", "match"), DAMAGED)
def test_what_is_no_answer_with_routes_is_refused(output, match):
    refused(output, match)


BOTH = {"token_ids": [R.tokens, OTHER.tokens]}
TWO = [R.routes_RLK, OTHER.routes_RLK]
BESIDE = [fr.RoutedLayer(0, kind) for kind in (fr.LayerKind.MTP, fr.LayerKind.DRAFT)]
KINDS = (fr.LayerKind.ATTENTION, fr.LayerKind.DECODER)
ROUTERS = fr.RoutingSpec(16, 3, tuple(fr.RoutedLayer(i, kind) for i in range(2) for kind in KINDS))
TOLD = [
    # tokens
    (wires.sglang(R), {"token_ids": [1] * 11}, "660 bytes without a shape; expected 10 rows of 3"),
    (wires.sglang(R), {"token_ids": None}, r"tokens.*sequence 0.*return_token_ids"),
    (wires.vllm_narrow(R), {"token_ids": [1] * 11}, r"12 tokens.*differ.*11"),
    ([wires.sglang(R)] * 2, {"token_ids": [[1] * 12]}, r"1 sequences.*routes of 2"),
    # starts
    (wires.vllm_narrow(R), {"start": 12}, r"starts at 12; .*12 tokens"),
    (table(ALL[2:], start=2), {"start": 3}, r"start is 3.*table states 2"),
    (TWO, BOTH | {"start": [0]}, "start has 1 positions for 2 sequences"),
    # rows that are said to be absent
    (ALL, {"valid": np.ones(10, bool)}, r"11 rows.*bool.*\(10,\)"),
    (ALL, {"valid": [np.ones(11, bool)] * 2}, r"valid of 2.*routes of 1"),
    *((DOORS[door](ALL), {"valid": np.ones(11, bool)}, r"valid.*routes alone") for door in ("sglang", "verl")),
    # models
    (ALL, {"model": "folder"}, r"model.*a str; .*ServedModel\.at\(FOLDER\)\.spec"),
    *((ALL, {"model": fr.RoutingSpec(8, 2, (fr.RoutedLayer(0), each))}, r"MTP.*draft layers") for each in BESIDE),
    (R.routes_RLK[:, :2], {"model": ROUTERS}, r"2 layers; expected 4 .*column"),
]


@pytest.mark.parametrize(("output", "given", "match"), TOLD)
def test_what_the_caller_says_and_cannot_be_is_refused(output, given, match):
    refused(output, match, **given)


def test_zeros_of_a_top_1_model_are_experts_or_none():
    r = wires.rollout(RNG, top_k=1)
    rows, batch = r.all_layers(), wires.verl([r])
    refused(rows * 0, r"nothing but.*zeros", model=r.spec)
    rows[4] = batch["routed_experts"][0, 4] = 0
    assert decode(rows, model=r.spec, token_ids=r.tokens).valid_N.sum() == 11
    refused(batch, r"well.*expert 0", model=r.spec, token_ids=None)


@pytest.mark.parametrize("layers", [1, 4])
def test_routes_for_the_last_token_of_a_verl_batch_mean_a_shift(layers):
    """Ten sequences, each row of which is one place further on. With one layer, all layers of a row agree."""
    rollouts = [wires.rollout(RNG, layers=layers, dense=0) for _ in range(10)]
    batch = wires.verl(rollouts)
    assert decode(batch, model=rollouts[0].spec).valid_N.sum() == 110
    shifted = np.roll(batch["routed_experts"], 1, axis=1)
    shifted[:, 0] = shifted[:, 1]
    with pytest.raises(CaptureError, match=r"sequence 0.*shifted"):
        decode({**batch, "routed_experts": shifted}, model=rollouts[0].spec)


def test_a_sequence_that_a_verl_batch_cut_has_routes_for_its_last_token():
    """Its width cuts the first sequence; one that ends before it shows that no rows are shifted."""
    rollouts = [wires.rollout(RNG, prompt=4, response=n) for n in (8, 3)]
    cut = {name: values[:, :-2] for name, values in wires.verl(rollouts).items()}
    trace = decode(cut, model=rollouts[0].spec)
    assert trace.lengths.tolist() == [10, 7]
    assert np.flatnonzero(~trace.valid_N).tolist() == [9, 16]  # what no later token depends on
    np.testing.assert_array_equal(trace.expert_ids_NLK[:9], rollouts[0].routes_RLK[:9])
    alone = {name: values[:1] for name, values in cut.items()}
    with pytest.raises(CaptureError, match=r"sequence 0.*routes"):
        decode(alone, model=rollouts[0].spec)


@pytest.mark.parametrize(("experts", "layers", "is_told"), [(16, 3, False), (20, 3, True), (32, 2, False)])
def test_a_spec_of_more_experts_than_are_ever_picked_is_warned_of(experts, layers, is_told):
    """Few layers tell nothing: a router that picks groups of experts may pick the first ones for all of a prompt."""
    found = wires.rollout(np.random.default_rng(7), layers=layers, prompt=40)
    assert found.routes_RLK.max() == 15
    spec = fr.RoutingSpec(experts, found.spec.top_k, found.spec.layers)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert decode(wires.vllm_narrow(found), model=spec).spec == spec
    assert [bool(re.search(f"no layer.*15 of {experts};", str(each.message))) for each in told] == [True] * is_told
    assert all(each.filename == __file__ for each in told)


DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]
ENDLESS: list = []
ENDLESS.append(ENDLESS)


class Raises:
    """An object of which nothing can be asked."""

    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")

    def __repr__(self):
        raise RuntimeError("no repr")


SCALARS = [None, True, 5, float("nan"), 10**5000, "", b"\xff", object(), Raises(), {1, 2}, range(3)]
HOSTILE = [
    *((), DEEP, ENDLESS, [None], [Raises()], {"choices": DEEP}, {"choices": ENDLESS}, {"routed_experts": Raises()}),
    *({"meta_info": DEEP}, {"outputs": np.zeros(3)}, {"sglext": np.zeros(3)}),
    {"routed_experts": {"data": DEEP, "shape": DEEP, "dtype": DEEP}},
    {"meta_info": {"routed_experts": "AAAA", "output_token_sampling_mask": DEEP, "indexer_topk": DEEP}},
    *([[[{1: DEEP}]]], [[[10**5000]]], '{"a":' * 60_000, "[[[" + "1" * 5000 + "]]]", "\ud800"),
    SimpleNamespace(batch={"routed_experts": 1, "input_ids": 2, "attention_mask": 3}),
    *(np.array(5), np.array([None]), np.zeros((11, 4, 3), bool), np.zeros((11, 4, 3), "datetime64[s]")),
    np.full((11, 4, 3), 1 << 63, np.uint64),
    np.ma.masked_array(R.routes_RLK, mask=R.routes_RLK == 1),
    [{"meta_info": {"routed_experts": "AAAA"}}, [{"meta_info": {}}]],
]
IDS = {"ids": lambda value: type(value).__name__}


@pytest.mark.parametrize("output", [*SCALARS, *HOSTILE], **IDS)
def test_hostile_output(output):
    with pytest.raises(CaptureError) as error:
        decode(output, model=R.spec, token_ids=R.tokens)
    assert len(str(error.value)) < 600


COMMON = [2.5, "1", [], object(), Raises(), np.array([1, 2]), DEEP, np.bool_(True), 10**5000]
NUMBERS = {"start": [*COMMON, -1, 12], "weight_version": [*COMMON, None, -2, 2**31]}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NUMBERS for value in NUMBERS[name]], **IDS)
def test_hostile_numbers(name, value):
    with pytest.raises(CaptureError, match=f"{name}|position"):
        decode(R.routes_RLK[1:], model=R.spec, token_ids=R.tokens, **{"start": 1, name: value})


TOKENS = [value for value in SCALARS if value is not None]
TOKENS += [[*R.tokens[:-1], last] for last in (True, 1.0, "7", None, -1, 2**31, 10**5000)]
TOKENS += [[], {}, set(R.tokens), DEEP, ENDLESS, [Raises()] * 12, [R.tokens, R.tokens], [[R.tokens]]]
TOKENS += [np.array(R.tokens, float), np.ones(12, bool), np.array(7)]


@pytest.mark.parametrize("tokens", TOKENS, **IDS)
def test_hostile_tokens(tokens):
    with pytest.raises(CaptureError, match="token") as error:
        decode(R.routes_RLK, model=R.spec, token_ids=tokens)
    assert len(str(error.value)) < 400
