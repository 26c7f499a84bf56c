"""The engine on a server of the user's: answers recorded from a real one, and everything else that may come."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreroute.adapters.checkpoint import ServedModel
from foreroute.engines import vllm
from foreroute.engines.http import Answer
from foreroute.engines.vllm import missing_settings
from foreroute.engines.vllm_server import EXTENSION
from foreroute.errors import CaptureError, ConfigError, EngineError
from foreroute.trace import SAMPLING
from tests.engines.recorded_answers import assert_routes, payload, serving
from tests.engines.small_policy import END, SAMPLED, seeded
from tests.tiers import grid
from tests.traces import sets_of

DATA = Path(__file__).parent / "data"
GENERATE, INFO = "/inference/v1/generate", "/server_info?config_format=json"
SETTINGS = {
    "model_config": {"enable_return_routed_experts": True, "logprobs_mode": "processed_logprobs"},
    "parallel_config": {"worker_extension_cls": EXTENSION, "pipeline_parallel_size": 1},
    "cache_config": {"enable_prefix_caching": True},
    "device_config": {"device": "cpu"},
    "scheduler_config": {"enable_chunked_prefill": False},
    "kv_transfer_config": {},
}
MASKED = SETTINGS | {"model_config": SETTINGS["model_config"] | {"return_sampling_mask": True}}
SETTINGS_031 = SETTINGS | {"model_config": {"logprobs_mode": "processed_logprobs"}}
SETTINGS_031 |= {"aux_output_config": {"enable_return_routed_experts": True}}
"""As vLLM states them from 0.31 on, where routes have a configuration of their own."""
PROMPT = np.array(payload(DATA / "generate.json")["request"]["token_ids"], np.int32)


class Server:
    """Answers as vLLM's server does, without a model: the recorded response to every prompt.

    `lie` changes an answer before it is sent.
    """

    def __init__(self, record="generate", lie=lambda answer: None, **changes):
        self.version, self.lie, self.record = "default", lie, payload(DATA / f"{record}.json")
        self.answers = {"/version": {"version": "0.30.0"}, INFO: {"vllm_config": SETTINGS}}
        self.answers |= {"/reset_prefix_cache": {"success": True}} | changes

    def __call__(self, method, path, body):
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/collective_rpc" and path not in self.answers:
            return 200, {"results": body["args"]}
        if path == "/weight_info" and path not in self.answers:
            return 200, {"weight_version": self.version}
        if path == GENERATE and path not in self.answers:
            answer = copy.deepcopy(self.record["response"])
            answer |= {"request_id": f"generate-tokens-{body['request_id']}", "prompt_token_ids": body["token_ids"]}
            self.lie(answer)
            return 200, answer
        value = self.answers.get(path, {})
        return value if isinstance(value, tuple) else (200, value)


def engine_at(server, routed, folder, version=None, **given):
    engine = vllm.VLLMEngine(ServedModel.of(routed), server.url, weights_folder=folder, timeout_s=5, **given)
    if version is not None:
        engine.load_weights(routed.model.state_dict(), version=version)
    return engine


def test_a_rollout_asks_for_what_it_needs_and_reads_the_answer(routed, tmp_path):
    with serving(answers := Server()) as server:
        engine = engine_at(server, routed, tmp_path, version=6)
        assert engine._client._timeout_s == 5
        got = engine.generate([PROMPT], SAMPLED, seeded())
        engine.close()
    assert_routes(got.trace, answers.record)
    assert got.trace.versions == (6,)
    steps = answers.record["response"]["choices"][0]["logprobs"]["content"]
    assert np.allclose(got.logprobs_R, [step["logprob"] for step in steps])
    asked = dict(server.asked)
    assert [path for path, _ in server.asked] == [
        *("/version", INFO),
        *("/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"),
        *(GENERATE, "/weight_info"),
    ]
    folder = Path(asked["/collective_rpc"]["args"][0])
    assert (folder / "model.safetensors").exists()
    body = asked[GENERATE]
    assert (body["token_ids"], body["return_token_ids"]) == (PROMPT.tolist(), True)
    # what a server may have as defaults, of its model's folder, is stated too
    stated = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    stated |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    ends = {"max_tokens": 5, "stop_token_ids": [END], "ignore_eos": True}
    assert body["sampling_params"].pop("seed") >= 0
    assert body["sampling_params"] == stated | ends | {"logprobs": 0, "detokenize": False}


def test_spans_of_weights_become_those_of_the_trace(routed, tmp_path):
    """Row P - 1 + j made output token j. Who changed the weights meanwhile must have been this trainer."""
    spans = [{"version": "6", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 5}]

    def stated(answer):
        answer["choices"][0]["weight_versions"] = spans

    newer = {"/version": {"version": "0.32.0"}, INFO: {"vllm_config": SETTINGS_031}}
    with serving(Server(lie=stated, **newer)) as server:
        engine = engine_at(server, routed, tmp_path, version=6)
        ask = engine._client.ask

        def changed_meanwhile(path, *args, **given):
            if path == GENERATE:
                engine.load_weights(routed.model.state_dict(), version=7)
            return ask(path, *args, **given)

        engine._client.ask = changed_meanwhile
        trace = engine.generate([PROMPT], SAMPLED, seeded()).trace
        # of the prompt's other rows nobody says under which weights they were computed
        assert trace.weight_versions_N.tolist() == [-1] * 7 + [6] * 2 + [7] * 3 + [-1]
        engine._client.ask = ask
        with pytest.raises(EngineError, match=r"weights.*version 6.*7"):
            engine.generate([PROMPT], SAMPLED, seeded())
        spans[:] = [{"version": "7", "start": 0, "end": 5}]
        assert engine.generate([PROMPT], SAMPLED, seeded()).trace.versions == (7,)
        assert (engine.generate([PROMPT], SAMPLED, seeded()).trace.weight_versions_N[:-1] == 7).all()


def test_cuts_ask_for_masks_and_every_request_of_such_a_server_has_a_bound(routed, tmp_path):
    sampling = replace(SAMPLED, top_p=0.9)
    with serving(answers := Server("generate_masks", **{INFO: {"vllm_config": MASKED}})) as server:
        engine = engine_at(server, routed, tmp_path)
        got = engine.generate([PROMPT], sampling, seeded())
        assert_routes(got.trace, answers.record)
        (choice,) = answers.record["response"]["choices"]
        expected = [None] * 7 + [[ids] for ids in choice["sampling_mask"]] + [None]
        assert sets_of(got.trace.streams[SAMPLING]) == expected
        engine.generate([PROMPT], replace(SAMPLED, temperature=0), seeded())
        asked = [body["sampling_params"] for path, body in server.asked if path == GENERATE]
        cuts = [{name: each[name] for name in ("temperature", "top_k", "top_p", "min_p")} for each in asked]
        assert cuts[0] == {"temperature": 0.8, "top_k": 64, "top_p": 0.9, "min_p": 0.0}
        assert (cuts[1]["temperature"], cuts[1]["top_k"]) == (1.0, 1)
        for mask, said in ((None, r"lacks.*garbles"), ([[3]] * 4, r"4 sampling masks, 13 tokens.*5 of")):
            answers.lie = lambda answer, mask=mask: answer["choices"][0].update(sampling_mask=mask)
            with pytest.raises((EngineError, CaptureError), match=said):
                engine.generate([PROMPT], sampling, seeded())
        engine.close()
    with serving(Server()) as server, pytest.raises(ConfigError, match="--return-sampling-mask"):
        engine_at(server, routed, tmp_path).generate([PROMPT], sampling, seeded())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({INFO: (404, b"Not Found")}, "VLLM_SERVER_DEV_MODE=1"),
        ({INFO: []}, r"lacks.*garbles"),
        ({"/weight_info": {"weight_version": None}}, r"lacks.*garbles"),
        ({GENERATE: (404, b"Not Found")}, "--enable-scale-out"),
        ({"/version": {"version": "0.27.3"}}, r"vLLM 0\.27\.3 .*not work"),
        ({"/collective_rpc": {"results": ["/elsewhere"]}}, r"workers loaded \['/elsewhere'\]"),
        ({"/reset_prefix_cache": {"success": False}}, r"not reset.*prefix cache"),
    ],
)
def test_what_the_server_fails_at_is_reported(routed, tmp_path, changes, said):
    with serving(Server(**changes)) as server, pytest.raises(EngineError, match=said):
        engine_at(server, routed, tmp_path, version=0).generate([PROMPT], SAMPLED, seeded())


OTHER = [(200, b""), (500, b"broken"), [], {}, True, None, {"success": False, "results": []}, {"results": [None]}]


@grid("path", ["/collective_rpc", "/update_weight_version"], quick=1)
def test_a_server_is_never_left_paused_and_samples_nothing_with_weights_half_loaded(routed, tmp_path, path):
    answer = Server()
    with serving(answer) as server:
        engine = engine_at(server, routed, tmp_path)
        for value in OTHER[1:2] if path == "/update_weight_version" else OTHER:
            answer.answers[path] = value
            server.asked.clear()
            with pytest.raises(EngineError) as caught:
                engine.load_weights(routed.model.state_dict(), version=1)
            assert len(str(caught.value)) < 1000
            assert [path for path, _ in server.asked].count("/resume") == 1
            assert server.asked[-1][0] == "/resume"
            with pytest.raises(EngineError, match=r"weights.*unknown"):
                engine.generate([PROMPT], SAMPLED, seeded())
            assert server.asked[-1][0] == "/resume"


@grid(
    ("version", "path", "value", "said"),
    [
        ("0.30.0", "model_config.enable_return_routed_experts", False, "--enable-return-routed-experts"),
        ("0.31.0", "aux_output_config.enable_return_routed_experts", False, "--enable-return-routed-experts"),
        ("0.30.0", "parallel_config.worker_extension_cls", "", "--worker-extension-cls foreroute"),
        ("0.30.0", "scheduler_config.enable_chunked_prefill", True, "--no-enable-chunked-prefill"),
        ("0.31.0", "cache_config.enable_prefix_caching", False, "--enable-prefix-caching"),
        ("0.32.0", "parallel_config.pipeline_parallel_size", 2, "--pipeline-parallel-size 1"),
        ("0.32.0", "kv_transfer_config.kv_connector", "NixlConnector", r"another.*connector"),
    ],
    quick=3,
)
def test_a_server_started_without_what_replay_needs_is_refused(routed, tmp_path, version, path, value, said):
    settings = copy.deepcopy(SETTINGS if version == "0.30.0" else SETTINGS_031)
    assert not missing_settings(Answer(copy.deepcopy(settings), "it"), version)
    section, _, name = path.partition(".")
    settings[section][name] = value
    changes = {INFO: {"vllm_config": settings}, "/version": {"version": version}}
    with serving(Server(**changes)) as server, pytest.raises(EngineError, match=rf"started with {said}"):
        engine_at(server, routed, tmp_path)


def test_what_is_no_server_is_refused(routed, tmp_path):
    served = ServedModel.of(routed)
    with pytest.raises(EngineError, match="running"):
        vllm.VLLMEngine(served, "http://127.0.0.1:9", weights_folder=tmp_path)
    with pytest.raises(ConfigError, match=r"ServerSettings.*address"):
        vllm.VLLMEngine(served, 8000, weights_folder=tmp_path)
    with pytest.raises(ConfigError, match=r"'http.*weights_folder"):
        vllm.VLLMEngine(served, "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"RoutedTransformer.*ServedModel\.of"):
        vllm.VLLMEngine(routed, "http://127.0.0.1:9", weights_folder=tmp_path)
    assert not list(tmp_path.iterdir())
