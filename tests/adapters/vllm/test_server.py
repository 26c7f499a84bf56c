"""The client of vLLM's server, on answers recorded from a real one."""

import copy
from pathlib import Path

import numpy as np
import pytest

from foreroute import capture
from foreroute.adapters import vllm
from foreroute.adapters.sampled import facts_of
from foreroute.adapters.vllm.server import EXTENSION, sampled_of
from foreroute.capture import Sampling
from foreroute.errors import ConfigError, EngineError
from recorded import assert_routes, payload, serving
from small import END, policy, seeded

DATA = Path(__file__).parent / "data"
SETTINGS = {
    "model_config": {"enable_return_routed_experts": True, "logprobs_mode": "processed_logprobs"},
    "parallel_config": {"worker_extension_cls": EXTENSION},
    "device_config": {"device": "cpu"},
    "scheduler_config": {"enable_chunked_prefill": False},
}


class Server:
    """Answers as vLLM's server does, without a model."""

    def __init__(self, **changes):
        self.version = "default"
        self.answers = {
            "/v1/models": {"data": [{"id": "tiny"}]},
            "/version": {"version": "0.30.0"},
            "/server_info?config_format=json": {"vllm_config": SETTINGS},
            "/v1/completions": payload(DATA / "completion_n2.json")["response"],
            "/reset_prefix_cache": {"success": True},
            **changes,
        }

    def __call__(self, method, path, body):
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/weight_info":
            return 200, {"weight_version": self.version}
        value = self.answers.get(path, {})
        return value if isinstance(value, tuple) else (200, value)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_answers_decode_to_the_routes_of_the_model(path):
    record = payload(path)
    start = record["request"].get("routed_experts_prompt_start", 0)
    trace = capture.decode(record["response"], model=record["spec"], token_ids=record["tokens"], start=start)
    assert_routes(trace, record, start=start)


def test_a_rollout_asks_for_what_it_needs_and_reads_the_answer(tmp_path):
    record = payload(DATA / "completion_n2.json")
    prompt = np.array(record["request"]["prompt"], np.int32)
    routed = policy()
    with serving(Server()) as server:
        engine = vllm.ServerEngine(routed, server.url, weights_folder=tmp_path)
        engine.load_weights(routed.model.state_dict(), version=6)
        got = engine.generate(
            [prompt], Sampling(group_size=2, max_new_tokens=5, end_token=END, temperature=0.8), seeded()
        )
        engine.close()
    assert_routes(got.trace, record)
    assert got.trace.versions == (6,)
    choices = record["response"]["choices"]
    assert np.allclose(got.logprobs_R, np.concatenate([c["logprobs"]["token_logprobs"] for c in choices]))
    asked = dict(server.asked)
    assert [path for path, _ in server.asked[3:8]] == [
        "/pause?mode=wait",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
    ]
    folder = Path(asked["/collective_rpc"]["args"][0])
    assert (folder / "model.safetensors").exists()
    body = asked["/v1/completions"]
    assert (body["prompt"], body["n"], body["stop_token_ids"]) == (prompt.tolist(), 2, [END])
    assert body["return_token_ids"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"/server_info?config_format=json": (404, b"Not Found")}, "VLLM_SERVER_DEV_MODE=1"),
        ({"/version": (200, b"<html>")}, "expected JSON"),
        ({"/reset_prefix_cache": {"success": False}}, "could not reset its prefix cache"),
        ({"/collective_rpc": (500, b"no such method")}, "refused with status 500: no such method"),
        ({"/v1/completions": {"choices": []}}, "0 responses to 1 x 2"),
        ({"/v1/completions": {"choices": [{"index": 0}]}}, "lacks or garbles"),
    ],
)
def test_what_the_server_fails_at_is_reported(tmp_path, changes, said):
    routed = policy()

    def use(url):
        engine = vllm.ServerEngine(routed, url, weights_folder=tmp_path, timeout_s=5)
        engine.load_weights(routed.model.state_dict(), version=0)
        prompt = np.arange(8, dtype=np.int32)
        engine.generate([prompt], Sampling(group_size=2, max_new_tokens=5, end_token=END), seeded())

    with serving(Server(**changes)) as server, pytest.raises(EngineError, match=said):
        use(server.url)


@pytest.mark.parametrize(
    ("section", "name", "value", "said"),
    [
        ("model_config", "enable_return_routed_experts", False, "--enable-return-routed-experts"),
        ("model_config", "logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("parallel_config", "worker_extension_cls", "", "--worker-extension-cls foreroute"),
        ("scheduler_config", "enable_chunked_prefill", True, "--no-enable-chunked-prefill"),
    ],
)
def test_a_server_started_without_what_replay_needs_is_refused(tmp_path, section, name, value, said):
    settings = copy.deepcopy(SETTINGS)
    settings[section][name] = value
    with (
        serving(Server(**{"/server_info?config_format=json": {"vllm_config": settings}})) as server,
        pytest.raises(EngineError, match=said),
    ):
        vllm.ServerEngine(policy(), server.url, weights_folder=tmp_path)


def test_a_server_that_is_not_there(tmp_path):
    with pytest.raises(EngineError, match="Is it running"):
        vllm.ServerEngine(policy(), "http://127.0.0.1:9", weights_folder=tmp_path)
    with pytest.raises(ConfigError, match="no address"):
        vllm.ServerEngine(policy(), "127.0.0.1:8000", weights_folder=tmp_path)


def test_an_engine_with_another_tokenizer_is_refused():
    record = payload(DATA / "completion.json")
    prompt = np.array(record["request"]["prompt"], np.int32)
    facts = facts_of(policy())
    [sampled] = sampled_of(record["response"], prompt)
    sampled.trace(facts, weight_version=0, engine="vllm", engine_version="0.30.0")
    for token in (facts.vocabulary_size, -1):
        answer = copy.deepcopy(record["response"])
        answer["choices"][0]["token_ids"][1] = token
        [sampled] = sampled_of(answer, prompt)
        with pytest.raises(
            EngineError, match=rf"sampled token {token}, the policy knows those below 64.*another model"
        ):
            sampled.trace(facts, weight_version=0, engine="vllm", engine_version="0.30.0")
    answer = copy.deepcopy(record["response"])
    answer["choices"][0]["prompt_token_ids"][0] += 1
    with pytest.raises(EngineError, match="a tokenizer or template of its own"):
        sampled_of(answer, prompt)


def test_log_probs_that_are_no_numbers_are_refused():
    record = payload(DATA / "completion.json")
    record["response"]["choices"][0]["logprobs"]["token_logprobs"][1] = None
    (sampled,) = sampled_of(record["response"], np.array(record["request"]["prompt"], np.int32))
    facts = capture.ModelFacts(record["spec"])
    with pytest.raises(EngineError, match="no finite number"):
        sampled.trace(facts, weight_version=0, engine="vllm", engine_version="0.30.0")
