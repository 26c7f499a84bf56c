"""What is refused, and that the message names what was seen."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import foreroute as fr
from benchmarks.harness import wires
from foreroute.capture import ModelFacts, decode, recognise
from foreroute.errors import CaptureError

RNG = np.random.default_rng(5)


def refused(output, r, match, **kwargs):
    with pytest.raises(CaptureError, match=match):
        decode(output, model=kwargs.pop("model", r.facts), token_ids=kwargs.pop("token_ids", r.tokens), **kwargs)


def edited(r, *, put):
    """The output of a rollout after `rows[where] = value` for each pair."""
    rows = r.all_layers()
    for where, value in put:
        rows[where] = value
    output = wires.vllm_narrow(r)
    output.outputs[0].routed_experts = rows.astype(np.int32)
    return output


@pytest.mark.parametrize(
    ("put", "match"),
    [
        ([(np.s_[:], 0)], "nothing but zeros in 4 of 4 layers .*enforce_eager"),
        ([(np.s_[:, 2], 0)], "nothing but zeros in 1 of 4 layers .first: decoder 2."),
        ([(np.s_[3, 2], [4, 4, 1])], "position 3, decoder 2 has expert ids .4, 4, 1., an expert twice .1 of 44"),
        ([(np.s_[3, 2, 0], 16)], "position 3, decoder 2 has expert ids .16, .*expected 0 to 15.*physical"),
        ([(np.s_[3, 2], -1)], "position 3, decoder 2 has expert ids .-1, -1, -1.; expected 0 to 15"),
        ([(np.s_[3], -1)], "position 3, decoder 1 has expert ids .-1"),
        ([(np.s_[:, 0], [1, 2, 3])], "decoder layer 0, which the spec says is dense"),
    ],
)
def test_false_rows(put, match):
    r = wires.rollout(RNG)
    refused(edited(r, put=put), r, match)


def test_constant_layer():
    r = wires.rollout(RNG, prompt=40)
    refused(edited(r, put=[(np.s_[:, 3], [5, 9, 2])]), r, r"decoder 3 sends all 44 rows to experts \[2, 5, 9\]")


def test_constant_layer_of_a_repeated_token_or_a_short_prompt_is_accepted():
    r = wires.rollout(RNG, prompt=40)
    same = wires.Rollout(r.facts, [7] * 40, r.response[:1] * 5, r.routes_RLK)
    assert decode(edited(same, put=[(np.s_[:, 3], [5, 9, 2])]), model=r.facts)
    short = wires.rollout(RNG)
    assert decode(edited(short, put=[(np.s_[:, 3], [5, 9, 2])]), model=short.facts)


def test_top_1_zeros():
    r = wires.rollout(RNG, top_k=1)
    refused(edited(r, put=[(np.s_[:], 0)]), r, "nothing but zeros")
    assert decode(edited(r, put=[(np.s_[4], 0)]), model=r.facts).valid_N.sum() == 11


def test_top_1_zero_filled_wire_is_ambiguous():
    r = wires.rollout(RNG, top_k=1)
    batch = wires.verl([r])
    batch["routed_experts"][0, 4] = 0
    refused(batch, r, "may as well be expert 0")


@pytest.mark.parametrize(("rows", "match"), [(10, "Rows are missing"), (12, "Rows are too many"), (13, "too many")])
def test_row_count(rows, match):
    r = wires.rollout(RNG)
    output = wires.vllm_narrow(r)
    output.outputs[0].routed_experts = np.resize(output.outputs[0].routed_experts, (rows, 5, 3))
    refused(output, r, rf"has {rows} rows for 12 tokens.*expected 11.*{match}")


@pytest.mark.parametrize(
    ("layers", "match"),
    [(6, "draft or MTP layer may pose"), (3, "Pipeline stages"), (8, "Pipeline stages")],
)
def test_layer_axis(layers, match):
    r = wires.rollout(RNG)
    output = wires.vllm_narrow(r)
    output.outputs[0].routed_experts = np.resize(r.all_layers(), (11, layers, 3))
    refused(output, r, rf"has {layers} layers; expected 4 .the routed layers. or 5 .all decoder layers.*{match}")


def test_all_layers_without_their_count():
    r = wires.rollout(RNG, dense=2)
    refused(wires.vllm_narrow(r), r, r"pass ModelFacts\(spec, num_hidden_layers", model=r.facts.spec)


def test_picks_axis():
    r = wires.rollout(RNG)
    output = wires.vllm_narrow(r)
    output.outputs[0].routed_experts = r.all_layers()[..., :2]
    refused(output, r, "has 2 picks in a row; expected top_k = 3")


def test_raw_bytes_that_fit_no_shape():
    r = wires.rollout(RNG)
    refused(wires.sglang(r), r, "165 ids without a shape; expected 10 rows", token_ids=r.tokens[:-1])
    refused(wires.sglang(r), r, "expected 9 rows", start=2)


@pytest.mark.parametrize("version", ["0.5.7", "0.5.9", "v0.5.9.post1", "0.4"])
def test_sglang_physical_ids(version):
    r = wires.rollout(RNG)
    refused(wires.sglang(r), r, "physical slots.*0.5.10 or newer", engine_version=version)
    assert decode(wires.sglang(r), model=r.facts, token_ids=r.tokens, engine_version="0.5.10")


def test_sglang_returns_one_choice_only():
    r = wires.rollout(RNG)
    body = json.loads(wires.sglang_openai(r))
    refused({**body, "choices": body["choices"] * 2}, r, "the response has 2 choices")


def test_lmdeploy_store_key():
    r = wires.rollout(RNG)
    output = SimpleNamespace(input_token_len=7, token_ids=r.response, routed_experts="3f2a9c0d3f2a9c0d")
    refused(output, r, "a key of a Ray shared store")


def test_missing_and_contradicting_tokens():
    r = wires.rollout(RNG)
    refused(wires.sglang(r), r, "does not carry the tokens of sequence 0", token_ids=None)
    refused(wires.vllm_narrow(r), r, "carries 12 tokens that differ from the 11", token_ids=r.tokens[:-1])
    refused([wires.sglang(r)] * 2, r, "tokens of 1 sequences for the routes of 2", token_ids=[r.tokens])
    refused(wires.sglang(r), r, "token 11 of sequence 0 is the str 'x'", token_ids=[*r.tokens[:-1], "x"])
    refused(wires.sglang(r), r, "expected token ids", token_ids=[*r.tokens[:-1], -1])


def test_contradicting_starts():
    r = wires.rollout(RNG)
    refused(wires.prime_rl(r, 3), r, "states start 3; expected 4", start=4)
    refused(wires.vllm_narrow(r), r, "starts at 12; expected a position of its 12 tokens", start=12)


@pytest.mark.parametrize(
    ("output", "match"),
    [
        ({"choices": [{"text": ""}]}, r"no routed_experts in \['text'\]; start the engine with"),
        ({"meta_info": {"id": 1}}, "no routed_experts"),
        (SimpleNamespace(outputs=[SimpleNamespace(routed_experts=None)]), "streams and unfinished requests"),
        ({}, "no routed_experts"),
        ("{", "starts like JSON and may have been cut, is not JSON"),
        ("[" * 100_000, "nested too deep"),
        (b"\xff\xfe\x00", "neither a .npy file nor text"),
        (np.zeros((2, 3, 4, 2), int), "padded batch"),
        ([1, 2], "flat list"),
        ([{"meta_info": {"routed_experts": ""}}, {"data": "", "shape": [], "dtype": ""}], "mix forms"),
        ({"routed_experts": {"data": ""}}, "expected data, shape and dtype"),
    ],
)
def test_no_container(output, match):
    with pytest.raises(CaptureError, match=match):
        recognise(output)


@pytest.mark.parametrize(
    ("output", "match"),
    [
        ("AAAA*AAA", "not base64"),
        ("AAAAA", "not base64"),
        ("AAAA\nAAAA", "not base64"),
        ("AAAA", "no whole number of int32"),
        ("nrlre1:float32:1x1x1:AAAA", "the envelope starts with"),
        ("nrlre1:int8:9999999999x9999x99:AAAA", "which is .* bytes; 3 bytes follow"),
        (wires.npy(np.zeros((1, 2, 3), np.float32)), "expected version 1 with an integer array"),
        (wires.npy(np.zeros((1, 2, 3), object)), "expected version 1 with an integer array"),
        (wires.npy(np.zeros((1, 2, 3), ">i4")), "expected version 1 with an integer array"),
        (wires.npy(np.zeros((2, 2, 3), np.uint8))[:-1], "which is 12 bytes; 11 bytes follow"),
        (b"\x93NUMPY", "expected version 1"),
        (
            wires.npy(np.zeros((1, 1, 1), np.uint8)).replace(b"(1, 1, 1)", b"(999999999999, 999999999999, 9)"),
            "npy file",
        ),
        ({"data": "AAAA", "shape": [0, 10**12, 10**12], "dtype": "uint8"}, "3 bytes follow"),
        ({"data": "", "shape": [7, 0, 10**12], "dtype": "uint8"}, "0 bytes follow"),
        ({"data": "AAAA", "shape": [3, 1, True], "dtype": "uint8"}, "expected three counts"),
        ({"data": "AAAA", "shape": [3, 1, 1], "dtype": "object"}, "expected one of uint8"),
        ({"data": 5, "shape": [3, 1, 1], "dtype": "uint8"}, "expected base64 text or bytes"),
        ({"meta_info": {"routed_experts": "AAAA", "routed_experts_dtype": "V3"}}, "advertises dtype 'V3'"),
        ([[[1, 2], [3]]], "uneven"),
        ([[[1, 2]], 3], "uneven"),
        ([[1, 2]], "nested 2 deep"),
        ([[[1.5, 2]]], "hold float 1.5"),
        ([[[True, 2]]], "hold bool True"),
        ([[["x" * 1000, 2]]], "hold str"),
        ([[[1 << 70, 2]]], "beyond 64 bits"),
        (np.zeros((11, 4, 3)), "dtype float64"),
        (np.zeros((11, 4), int), "expected .rows, layers, picks."),
    ],
)
def test_damaged_bytes(output, match):
    r = wires.rollout(RNG)
    refused(output, r, match)


def test_specs_that_no_engine_can_fill():
    mtp = fr.RoutingSpec(8, 2, (fr.RoutedLayer(0), fr.RoutedLayer(0, fr.LayerKind.MTP)))
    with pytest.raises(CaptureError, match="lists MTP or draft layers"):
        ModelFacts(mtp)
    with pytest.raises(CaptureError, match="num_hidden_layers is 3, but the spec routes decoder layer 3"):
        ModelFacts(fr.RoutingSpec(8, 2, (fr.RoutedLayer(3),)), num_hidden_layers=3)


def test_weight_version_out_of_range():
    r = wires.rollout(RNG)
    refused(wires.vllm_narrow(r), r, "weight_version is 4294967296", weight_version=1 << 32)


@pytest.mark.parametrize("writer", [wires.prime_rl, wires.skyrl])
def test_routes_for_the_last_token_mean_a_shift(writer):
    r = wires.rollout(RNG)
    longer = wires.Rollout(r.facts, r.prompt, [*r.response, 1], np.concatenate([r.routes_RLK, r.routes_RLK[:1]]))
    refused(writer(longer), r, "has routes for its last token.*The rows are shifted")
