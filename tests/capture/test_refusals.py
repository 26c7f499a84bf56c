"""What is refused, and that the message names what was seen."""

import base64
import json
from types import SimpleNamespace

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import decode
from foreroute.errors import CaptureError
from tests import wires

RNG = np.random.default_rng(5)


def refused(output, r, match, **kwargs):
    with pytest.raises(CaptureError, match=match):
        decode(output, model=kwargs.pop("model", r.spec), token_ids=kwargs.pop("token_ids", r.tokens), **kwargs)


def edited(r, where, value):
    """The output of a rollout after `rows[where] = value`."""
    rows = r.all_layers()
    rows[where] = value
    output = wires.vllm_narrow(r)
    output.outputs[0].routed_experts = rows.astype(np.int32)
    return output


@pytest.mark.parametrize(
    ("where", "value", "match"),
    [
        (np.s_[:], 0, "nothing but zeros in 4 of 4 layers .*enforce_eager"),
        (np.s_[:, 2], 0, "nothing but zeros in 1 of 4 layers .first: decoder 2."),
        (np.s_[3, 2], [4, 4, 1], "position 3, decoder 2 has expert ids .4, 4, 1.: an expert is picked twice"),
        (np.s_[3, 2, 0], 16, "from 0 to 16; expected 0 to 15.*physical ids"),
        (np.s_[3, 2], -1, "from -1 to 15; expected 0 to 15.*not filled"),
        (np.s_[3, 2:], -1, "from -1 to 15; expected 0 to 15"),
        (np.s_[:, 0], [1, 2, 3], "decoder layer 0, which the spec says is dense"),
    ],
)
def test_false_rows(where, value, match):
    r = wires.rollout(RNG)
    refused(edited(r, where, value), r, match)


def test_constant_layer():
    r = wires.rollout(RNG, prompt=40)
    refused(
        edited(r, np.s_[:, 3], [5, 9, 2]),
        r,
        r"position 0: decoder 3 sends 44 rows.* of 4\d different tokens to experts \[5, 9, 2\]",
    )


def test_constant_layer_of_a_repeated_token_or_a_short_prompt_is_accepted():
    r = wires.rollout(RNG, prompt=40)
    same = wires.Rollout(r.spec, r.num_layers, [7] * 40, r.response[:1] * 5, r.routes_RLK)
    assert decode(edited(same, np.s_[:, 3], [5, 9, 2]), model=r.spec)
    short = wires.rollout(RNG)
    assert decode(edited(short, np.s_[:, 3], [5, 9, 2]), model=short.spec)


def test_top_1_zeros():
    r = wires.rollout(RNG, top_k=1)
    refused(edited(r, np.s_[:], 0), r, "nothing but zeros")
    assert decode(edited(r, np.s_[4], 0), model=r.spec).valid_N.sum() == 11


def test_top_1_zero_filled_wire_is_ambiguous():
    r = wires.rollout(RNG, top_k=1)
    batch = wires.verl([r])
    batch["routed_experts"][0, 4] = 0
    refused(batch, r, "may as well be expert 0")


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((10, 5, 3), "has 10 rows for 12 tokens.*expected 11.*Rows are missing"),
        *(((rows, 5, 3), f"has {rows} rows for 12 tokens.*expected 11.*Rows are too many") for rows in (12, 13)),
        *(((11, n, 3), rf"have {n} layers; expected 4 .*, or all decoder layers, 5 or more") for n in (1, 2, 3)),
        ((11, 5, 2), "has 2 picks in a row; expected top_k = 3"),
    ],
)
def test_axes_of_another_length(shape, match):
    r = wires.rollout(RNG)
    output = wires.vllm_narrow(r)
    output.outputs[0].routed_experts = np.resize(r.all_layers(), shape)
    refused(output, r, match)


@pytest.mark.parametrize("writer", [wires.vllm_narrow, wires.vllm_http, wires.sglang, lambda r: wires.verl([r])])
def test_a_draft_layer_that_poses_as_a_decoder_layer(writer):
    """An axis of one layer more than the model has: behind the last one, or before the first."""
    r = wires.rollout(RNG)
    more = wires.rollout(RNG, dense=1, layers=5)
    behind = wires.Rollout(more.spec, 6, r.prompt, r.response, more.routes_RLK)
    refused(writer(behind), r, "has routes in decoder layer 5, which the spec says is dense.*draft or MTP layer")
    front = wires.rollout(RNG, dense=0, layers=6)
    before = wires.Rollout(front.spec, 6, r.prompt, r.response, front.routes_RLK)
    refused(writer(before), r, "has routes in decoder layer 0, which the spec says is dense")


def test_two_routers_of_one_layer_have_no_place_on_an_axis_of_layers():
    kinds = (fr.LayerKind.ATTENTION, fr.LayerKind.DECODER)
    spec = fr.RoutingSpec(16, 3, tuple(fr.RoutedLayer(i, kind) for i in range(2) for kind in kinds))
    r = wires.rollout(RNG, dense=0)
    assert decode(r.routes_RLK, model=spec, token_ids=r.tokens).valid_N.sum() == 11
    refused(r.routes_RLK[:, :2], r, "have 2 layers; expected 4 .*with one column for each", model=spec)


def with_two_choices(r):
    body = json.loads(wires.sglang_openai(r))
    return body | {"choices": body["choices"] * 2}


@pytest.mark.parametrize(
    ("write", "match", "given"),
    [
        (wires.sglang, "660 bytes without a shape; expected 10 rows of 3", {"token_ids": [1] * 11}),
        (wires.sglang, "expected 9 rows", {"start": 2}),
        (with_two_choices, "the response has 2 choices", {}),
        (wires.sglang, "does not carry the tokens of sequence 0", {"token_ids": None}),
        (wires.vllm_narrow, "carries 12 tokens that differ from the 11", {"token_ids": [1] * 11}),
        (lambda r: [wires.sglang(r)] * 2, "token_ids of 1 sequences for the routes of 2", {"token_ids": [[1] * 12]}),
        (wires.vllm_narrow, "starts at 12; expected a position of its 12 tokens", {"start": 12}),
    ],
)
def test_tokens_and_starts_that_do_not_fit(write, match, given):
    r = wires.rollout(RNG)
    refused(write(r), r, match, **given)


def raw(text):
    return {"meta_info": {"routed_experts": text}}


@pytest.mark.parametrize(
    ("output", "match"),
    [
        ({"choices": [{"text": ""}]}, r"choice 0 has no routed_experts in \['text'\]; start the engine with"),
        ({"meta_info": {"id": 1}}, "no routed_experts"),
        (SimpleNamespace(outputs=[SimpleNamespace(routed_experts=None)]), "streams and unfinished requests"),
        ({}, "no routed_experts"),
        (
            {"routed_experts": {"data": "", "shape": [], "dtype": ""}},
            "are a table of '', '' of shape .*expected base64",
        ),
        ({"routed_experts": {"data": ""}}, "routed_experts of the answer is a dict; expected an array"),
        ({"routed_experts": [[[1, 2]]]}, "has 1 rows for 12 tokens"),
        ("{", "the text, which may have been cut, is not JSON"),
        ("[" * 100_000, "nested too deep"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (np.zeros((2, 3, 4, 2), int), r"do not say what is padding: RoutingTrace.from_padded takes them"),
        ([1, 2], "no routed_experts in 1;"),
        ([[[1, 2]]], "has 1 rows for 12 tokens"),
        ([[1, 2]], r"output 0: the answer has no routed_experts in \[1, 2\]"),
        ([], r"no routed_experts in \[\]"),
        ([{"meta_info": {"routed_experts": ""}}, np.zeros((1, 2, 3), int)], "mix forms .array, sglang."),
        ({"routed_experts": np.zeros((1, 2, 3, 2), int), "input_ids": np.zeros((1, 2), int)}, "lacks position_ids"),
        (raw("AAAA*AAA"), "not base64"),
        (raw("AAAAA"), "not base64"),
        (raw("AAAA\nAAAA"), "not base64"),
        (raw("AAAA"), "3 bytes without a shape"),
        (raw(""), "0 bytes without a shape"),
        (wires.npy(np.zeros((1, 2, 3), np.float32)), "expected version 1 with an integer array"),
        (wires.npy(np.zeros((1, 2, 3), object)), "expected version 1 with an integer array"),
        (wires.npy(np.zeros((1, 2, 3), ">i4")), "expected version 1 with an integer array"),
        (wires.npy(np.zeros((2, 2, 3), np.uint8))[:-1], "which is 12 bytes; 11 bytes follow"),
        (b"\x93NUMPY", "expected version 1"),
        (
            wires.npy(np.zeros((1, 1, 1), np.uint8)).replace(b"(1, 1, 1)", b"(999999999999, 999999999999, 9)"),
            "npy file",
        ),
        (wires.npy(np.zeros((0, 1, 1), np.uint8)).replace(b"(0, 1, 1)", b"(7, 0, 9)"), "0 bytes follow"),
        (np.zeros((11, 4, 3)), "dtype float64"),
        (np.zeros((11, 4), int), "expected .rows, layers, picks., or"),
    ],
)
def test_no_form_and_damaged_bytes(output, match):
    r = wires.rollout(RNG)
    refused(output, r, match)


@pytest.mark.parametrize("kind", [fr.LayerKind.MTP, fr.LayerKind.DRAFT])
def test_a_spec_that_no_engine_can_fill(kind):
    spec = fr.RoutingSpec(8, 2, (fr.RoutedLayer(0), fr.RoutedLayer(0, kind)))
    refused(np.zeros((1, 2, 2), int), wires.rollout(RNG), "lists MTP or draft layers", model=spec)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int64"])
def test_raw_bytes_of_another_type_than_int32(dtype):
    """Nothing says so but what they become: another number of ids, or ids of no expert."""
    r = wires.rollout(RNG, prompt=8, response=5)
    text = base64.b64encode(r.all_layers().astype(dtype).tobytes()).decode()
    refused(raw(text), r, "without a shape|layers; expected|the spec says is dense|holds ids from")


@pytest.mark.parametrize("layers", [1, 4])
def test_routes_for_the_last_token_of_a_verl_batch_mean_a_shift(layers):
    """Ten sequences, each row of which is one place further on. With one layer, all layers of a row agree."""
    rollouts = [wires.rollout(RNG, layers=layers, dense=0) for _ in range(10)]
    batch = wires.verl(rollouts)
    assert decode(batch, model=rollouts[0].spec).valid_N.sum() == 110
    shifted = np.roll(batch["routed_experts"], 1, axis=1)
    shifted[:, 0] = shifted[:, 1]
    with pytest.raises(CaptureError, match=r"sequence 0 has routes for its last token.*The rows are shifted"):
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
    with pytest.raises(CaptureError, match="sequence 0 has routes for its last token"):
        decode(alone, model=rollouts[0].spec)


NARROW = {
    "array": lambda r, dtype: r.all_layers().astype(dtype),
    "npy": lambda r, dtype: wires.npy(r.all_layers().astype(dtype)),
    "vllm": lambda r, dtype: {"routed_experts": r.all_layers().astype(dtype)},
    "vllm http": lambda r, dtype: {
        "routed_experts": base64.b64encode(wires.npy(r.all_layers().astype(dtype))).decode()
    },
    "verl": lambda r, dtype: {
        name: values.astype(dtype) if name == "routed_experts" else values for name, values in wires.verl([r]).items()
    },
}


@pytest.mark.parametrize(("experts", "dtype"), [(300, "uint8"), (257, "uint8"), (129, "int8"), (300, "int8")])
@pytest.mark.parametrize("form", NARROW)
def test_ids_of_a_type_that_is_too_narrow_for_the_model(form, experts, dtype):
    """Each row is possible: two ids, which are those of the model less 256."""
    r = wires.rollout(RNG, experts=experts, top_k=2, dense=0)
    output = NARROW[form](r, dtype)
    refused(output, r, rf"ids of {dtype}, which cannot tell {experts} experts apart; expected uint")


@pytest.mark.parametrize(("experts", "dtype"), [(256, "uint8"), (128, "int8"), (300, "int16"), (300, "uint16")])
@pytest.mark.parametrize("form", NARROW)
def test_ids_of_the_narrowest_type_that_holds_the_model(form, experts, dtype):
    r = wires.rollout(RNG, experts=experts, top_k=2, dense=0)
    trace = decode(NARROW[form](r, dtype), model=r.spec, token_ids=r.tokens)
    assert np.array_equal(trace.expert_ids_NLK[:-1], r.routes_RLK)
