"""The client of SGLang's server, on answers recorded from a real one."""

import base64
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreroute.adapters.checkpoint import ServedModel
from foreroute.engines import sglang
from foreroute.errors import CaptureError, EngineError
from foreroute.trace import SAMPLING, IndexerSpec, RoutedLayer
from tests.engines.recorded_answers import assert_routes, payload, serving
from tests.engines.small_policy import END, SAMPLED, policy, seeded
from tests.traces import sets_of

DATA = Path(__file__).parent / "data"
PROMPT = np.array(payload(DATA / "generate.json")["request"]["input_ids"], np.int32)


class Server:
    """Answers as SGLang does, without a model: the recorded response to every prompt.

    `lie` changes an answer before it is sent.
    """

    def __init__(self, lie=lambda answer: None, **changes):
        self.version, self.lie = "default", lie
        self.answers = {"/server_info": {"enable_return_routed_experts": True, "version": "0.5.23"}}
        self.answers |= {"/update_weights_from_disk": {"success": True, "message": ""}} | changes

    def __call__(self, method, path, body):
        if path == "/update_weights_from_disk":
            self.version = body["weight_version"]
        if path == "/generate" and path not in self.answers:
            answer = payload(DATA / "generate.json")["response"]
            answer["meta_info"]["weight_versions"] = [{"version": self.version, "start": 0, "end": 5}]
            if body["return_sampling_mask"]:
                answer["meta_info"] |= masks_for(answer["output_ids"])
            answer["meta_info"]["id"] = body["rid"]
            self.lie(answer)
            return 200, answer
        return 200, self.answers[path]


def masks_for(tokens):
    """The fields of SGLang 0.5.23, made up: sets by descending weight, and log-probs on them."""
    return {
        "output_token_sampling_mask": [[token, (token + 9) % 64, (token + 3) % 64] for token in tokens],
        "output_token_sampling_logprobs": [-0.25 * number for number in range(len(tokens))],
        "output_token_sampling_mask_length": len(tokens),
    }


def test_a_rollout_asks_for_what_it_needs_and_reads_the_answers(tmp_path):
    record = payload(DATA / "generate.json")
    with serving(Server()) as server:
        got = rollout(server.url, tmp_path)
    two = {**record, "tokens": record["tokens"] * 2, "expected": record["expected"] * 2}
    assert_routes(got.trace, two)
    assert got.trace.versions == (3,)
    logprobs = [entry[0] for entry in record["response"]["meta_info"]["output_token_logprobs"]]
    assert np.allclose(got.logprobs_R, logprobs * 2)
    assert dict(server.asked)["/update_weights_from_disk"]["flush_cache"]
    bodies = [body for path, body in server.asked if path == "/generate"]
    assert all(body["input_ids"] == PROMPT.tolist() and body["return_routed_experts"] for body in bodies)
    asked = [body["sampling_params"] for body in bodies]
    assert len({params["sampling_seed"] for params in asked}) == 2
    # with ignore_eos SGLang would not stop at the end token
    assert all(params["stop_token_ids"] == [END] and not params.get("ignore_eos") for params in asked)


def test_a_rollout_with_cuts_asks_for_masks_and_takes_the_log_probs_on_them(tmp_path):
    record = payload(DATA / "generate.json")
    with serving(Server()) as server:
        got = rollout(server.url, tmp_path, top_p=0.9)
        plain = rollout(server.url, tmp_path / "other")
    asked = [body for path, body in server.asked if path == "/generate"]
    assert [body["return_sampling_mask"] for body in asked] == [True, True, False, False]
    cuts = {name: asked[0]["sampling_params"][name] for name in ("temperature", "top_k", "top_p", "min_p")}
    assert cuts == {"temperature": 0.8, "top_k": 64, "top_p": 0.9, "min_p": 0.0}
    assert np.allclose(got.logprobs_R, np.tile([0, -0.25, -0.5, -0.75, -1], 2))
    expected = [[sorted({token, (token + 9) % 64, (token + 3) % 64})] for token in record["response"]["output_ids"]]
    assert sets_of(got.trace.streams[SAMPLING]) == ([None] * 7 + expected + [None]) * 2
    assert not plain.trace.streams


@pytest.mark.parametrize(("mask", "said"), [(None, r"lacks.*garbles"), ([[1, 2]] * 5, "leave out.*position")])
def test_masks_that_the_server_did_not_return_are_missed(tmp_path, mask, said):
    lying = Server(lie=lambda answer: answer["meta_info"].update(output_token_sampling_mask=mask))
    with serving(lying) as server, pytest.raises((EngineError, CaptureError), match=said):
        rollout(server.url, tmp_path, top_p=0.9)


@pytest.mark.parametrize("enabled", [True, False])
def test_choices_of_indexers_are_asked_for_where_the_server_returns_them(tmp_path, enabled):
    """By the source of SGLang: int32 [tokens - 1, layers, top-k], and -1 behind the last."""
    record = payload(DATA / "generate.json")
    rows = len(record["tokens"][0]) - 1
    indexers = IndexerSpec(2, (RoutedLayer(0), RoutedLayer(2)))
    served = ServedModel.of(policy())
    assert served.indexers is None
    served = replace(served, indexers=indexers)
    chosen = np.full((rows, 3, 2), -1, np.int32)
    chosen[0, :, 0], chosen[1:] = 0, [0, 1]

    def with_choices(answer):
        del answer["meta_info"]["weight_versions"]
        answer["meta_info"] |= {"weight_version": "3"}
        answer["meta_info"] |= {"indexer_topk": base64.b64encode(chosen.tobytes()).decode()} if enabled else {}

    info = {"enable_return_routed_experts": True, "enable_return_indexer_topk": enabled, "version": "0.5.23"}
    with (
        serving(Server(lie=with_choices, **{"/server_info": info})) as server,
        warnings.catch_warnings(record=True, action="always") as found,
    ):
        got = rollout(server.url, tmp_path, served=served, group_size=1)
    assert ["--enable-return-indexer-topk" in str(each.message) for each in found] == [True] * (not enabled)
    assert dict(server.asked)["/generate"].get("return_indexer_topk", False) is enabled
    assert ("indexer" in got.trace.streams) is enabled
    if enabled:
        stream = got.trace.streams["indexer"]
        assert stream.counts_ND.tolist() == [[0, 0]] * 2 + [[2, 2]] * (rows - 2) + [[0, 0]]
        assert stream.layers == indexers.layers


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"/server_info": {"enable_return_routed_experts": False, "version": "0.5.23"}}, "--enable-return-routed-exp"),
        ({"/server_info": {"enable_return_routed_experts": True, "version": "0.5.9"}}, r"SGLang 0\.5\.9 .*not work"),
        ({"/server_info": [1]}, r"lacks.*garbles"),
        ({"/update_weights_from_disk": {"success": False, "message": "no file"}}, r"weights: no.*file"),
        ({"/generate": [{"output_ids": [1]}]}, r"lacks.*garbles"),
    ],
)
def test_what_the_server_fails_at_is_reported(tmp_path, changes, said):
    with serving(Server(**changes)) as server, pytest.raises(EngineError, match=said):
        rollout(server.url, tmp_path)


def test_weights_that_were_refused_sample_nothing_and_newer_servers_are_warned_of(tmp_path):
    routed = policy()
    info = {"enable_return_routed_experts": True, "version": "0.6.0"}
    refused = {"success": False, "message": "x" * 5000}
    with serving(Server(**{"/server_info": info, "/update_weights_from_disk": refused})) as server:
        with pytest.warns(UserWarning, match=r"SGLang 0\.6\.0.*newer.*0\.5\.23"):
            engine = sglang.SGLangServerEngine(ServedModel.of(routed), server.url, weights_folder=tmp_path, timeout_s=5)
        with pytest.raises(EngineError) as caught:
            engine.load_weights(routed.model.state_dict(), version=3)
        assert len(str(caught.value)) < 1000
        with pytest.raises(EngineError, match=r"weights.*unknown"):
            engine.generate([PROMPT], SAMPLED, seeded())


def rollout(url, folder, *, served=None, group_size=2, **cuts):
    routed = policy()
    engine = sglang.SGLangServerEngine(served or ServedModel.of(routed), url, weights_folder=folder, timeout_s=5)
    try:
        engine.load_weights(routed.model.state_dict(), version=3)
        return engine.generate([PROMPT], replace(SAMPLED, group_size=group_size, **cuts), seeded())
    finally:
        engine.close()
