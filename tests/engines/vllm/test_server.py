"""The client of vLLM's server, on answers recorded from a real one."""

import copy
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from foreroute import capture
from foreroute.adapters.checkpoint import ServedModel
from foreroute.capture import Sampling
from foreroute.engines import vllm
from foreroute.engines.vllm.server_engine import EXTENSION, sequences_of
from foreroute.errors import CaptureError, ConfigError, EngineError
from foreroute.trace import SAMPLING
from tests.engines.recorded_answers import assert_routes, payload, serving
from tests.engines.small_policy import END, SIZES, policy, seeded

DATA = Path(__file__).parent / "data"
SETTINGS = {
    "model_config": {"enable_return_routed_experts": True, "logprobs_mode": "processed_logprobs"},
    "parallel_config": {"worker_extension_cls": EXTENSION},
    "device_config": {"device": "cpu"},
    "scheduler_config": {"enable_chunked_prefill": False},
}


@pytest.fixture(scope="module")
def routed():
    return policy()


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
        if path == "/collective_rpc" and path not in self.answers:
            return 200, {"results": body["args"]}
        if path == "/weight_info" and path not in self.answers:
            return 200, {"weight_version": self.version}
        value = self.answers.get(path, {})
        return value if isinstance(value, tuple) else (200, value)


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda path: path.stem)
def test_recorded_answers_decode_to_the_routes_of_the_model(path):
    record = payload(path)
    start = record["request"].get("routed_experts_prompt_start", 0)
    known = {"model": record["spec"], "vocabulary_size": SIZES["vocab_size"]}
    trace = capture.decode(record["response"], **known, token_ids=record["tokens"], start=start)
    assert_routes(trace, record, start=start)


def test_a_rollout_asks_for_what_it_needs_and_reads_the_answer(tmp_path):
    record = payload(DATA / "completion_n2.json")
    prompt = np.array(record["request"]["prompt"], np.int32)
    routed = policy()
    with serving(Server()) as server:
        engine = vllm.VLLMServerEngine(ServedModel.of(routed), server.url, weights_folder=tmp_path)
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


def require_top_p(routed, got, choice):
    """The sets are the fewest tokens of the model with 0.9 of the probability, and log-probs are those on them."""
    with torch.no_grad():
        logits_TV = routed.model(input_ids=torch.from_numpy(got.trace.tokens(0))[None].long()).logits[0]
    rows = (logits_TV[7:-1] / 0.8).softmax(-1)
    for row, ids, token, logprob in zip(
        rows, choice["sampling_mask"], choice["token_ids"], got.logprobs_R, strict=True
    ):
        kept = float(row[ids].sum())
        assert kept >= 0.9 > kept - float(row[ids].min())
        assert float(row[token]) / kept == pytest.approx(np.exp(logprob), rel=1e-4)


def test_cuts_go_to_the_path_that_returns_masks(tmp_path):
    record = payload(DATA / "generate_masks.json")
    prompt, routed = np.array(record["request"]["token_ids"], np.int32), policy()
    info = {"vllm_config": SETTINGS | {"model_config": SETTINGS["model_config"] | {"return_sampling_mask": True}}}
    answer = record["response"] | {"prompt_token_ids": prompt.tolist()}
    answers = {"/server_info?config_format=json": info, "/inference/v1/generate": answer}
    sampling = Sampling(max_new_tokens=5, end_token=END, temperature=0.8, top_p=0.9)
    with serving(Server(**answers)) as server:
        engine = vllm.VLLMServerEngine(ServedModel.of(routed), server.url, weights_folder=tmp_path)
        got = engine.generate([prompt], sampling, seeded())
        assert_routes(got.trace, record)
        (choice,) = answer["choices"]
        assert np.allclose(got.logprobs_R, [step["logprob"] for step in choice["logprobs"]["content"]])
        masks = got.trace.streams[SAMPLING]
        assert np.flatnonzero(masks.valid_N).tolist() == [7, 8, 9, 10, 11]
        assert masks.ids.tolist() == [*chain(*choice["sampling_mask"])]
        require_top_p(routed, got, choice)
        body = dict(server.asked)["/inference/v1/generate"]
        assert body["token_ids"] == prompt.tolist()
        cuts = {name: body["sampling_params"][name] for name in ("temperature", "top_k", "top_p", "min_p", "n")}
        assert cuts == {"temperature": 0.8, "top_k": 64, "top_p": 0.9, "min_p": 0.0, "n": 1}
        # every request of such a server needs a bound
        with pytest.raises(EngineError, match="responses"):
            engine.generate([prompt], Sampling(max_new_tokens=5, end_token=END, temperature=0), seeded())
        asked = dict(server.asked)["/v1/completions"]
        assert (asked["temperature"], asked["top_k"]) == (1.0, 1)
        for damage, said in (
            ({"sampling_mask": None}, "lacks or garbles"),
            ({"sampling_mask": [[3]] * 4}, "4 sampling masks, 13 tokens and 5 of them generated"),
        ):
            choice |= damage
            with pytest.raises((EngineError, CaptureError), match=said):
                engine.generate([prompt], sampling, seeded())
        engine.close()
    with serving(Server()) as server:
        engine = vllm.VLLMServerEngine(ServedModel.of(routed), server.url, weights_folder=tmp_path)
        with pytest.raises(ConfigError, match="--return-sampling-mask --enable-scale-out"):
            engine.generate([prompt], sampling, seeded())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"/server_info?config_format=json": (404, b"Not Found")}, "VLLM_SERVER_DEV_MODE=1"),
        ({"/version": (200, b"<html>")}, "is not JSON"),
        ({"/version": {"version": "0.27.3"}}, r"vLLM 0\.27\.3 does not work"),
        ({"/version": {"version": "0.31.0"}}, r"vLLM 0\.31\.0 does not work.*install 0\.30\.0"),
        ({"/version": (302, b"", {"Location": "http://127.0.0.1:1/version"})}, "sends to http://127.0.0.1:1/version"),
        ({"/collective_rpc": {"results": ["/elsewhere"]}}, "workers loaded ['/elsewhere']".replace("[", r"\[")),
        ({"/reset_prefix_cache": {"success": False}}, "could not reset its prefix cache"),
        ({"/collective_rpc": (500, b"no such method")}, "refused with status 500: no such method"),
        ({"/v1/completions": {"choices": []}}, "0 responses to 1 x 2"),
        ({"/v1/completions": {"choices": [{"index": 0}]}}, "lacks or garbles"),
    ],
)
def test_what_the_server_fails_at_is_reported(tmp_path, changes, said):
    routed = policy()

    def use(url):
        engine = vllm.VLLMServerEngine(ServedModel.of(routed), url, weights_folder=tmp_path, timeout_s=5)
        engine.load_weights(routed.model.state_dict(), version=0)
        prompt = np.arange(8, dtype=np.int32)
        engine.generate([prompt], Sampling(group_size=2, max_new_tokens=5, end_token=END), seeded())

    with serving(Server(**changes)) as server, pytest.raises(EngineError, match=said):
        use(server.url)


OTHER = [
    *((200, b""), (500, b"broken"), [], {}, "text", 3, True, None, {"success": False, "results": []}),
    *({"data": []}, {"data": [{"id": 3}]}, {"version": 30}, {"results": [None]}, {"vllm_config": {"model_config": []}}),
    *({"choices": {}}, {"choices": [3]}, {"weight_version": None}),
]


@pytest.mark.parametrize(
    "path", ["/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
)
def test_a_server_is_never_left_paused_and_samples_nothing_with_weights_half_loaded(routed, tmp_path, path):
    only_status = path in ("/pause?mode=wait", "/update_weight_version")
    answer = Server()
    with serving(answer) as server:
        engine = vllm.VLLMServerEngine(ServedModel.of(routed), server.url, weights_folder=tmp_path, timeout_s=5)
        for value in OTHER[1:2] if only_status else OTHER:
            answer.answers[path] = value
            server.asked.clear()
            with pytest.raises(EngineError):
                engine.load_weights(routed.model.state_dict(), version=1)
            assert [path for path, _ in server.asked].count("/resume") == 1
            assert server.asked[-1][0] == "/resume"
            with pytest.raises(EngineError, match="weights are unknown"):
                engine.generate([np.arange(8, dtype=np.int32)], Sampling(max_new_tokens=5, end_token=END), seeded())
            assert server.asked[-1][0] == "/resume"


def test_a_server_that_cannot_be_resumed_is_said_to_be_paused(tmp_path):
    routed = policy()
    with serving(Server(**{"/collective_rpc": (500, b"no room"), "/resume": (500, b"no")})) as server:
        engine = vllm.VLLMServerEngine(ServedModel.of(routed), server.url, weights_folder=tmp_path, timeout_s=5)
        with pytest.raises(EngineError, match=r"no room(.|\n)*It may be paused still: .*resume refused"):
            engine.load_weights(routed.model.state_dict(), version=1)


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/version", "/server_info?config_format=json", "/weight_info", "/v1/completions", "/collective_rpc"],
)
def test_any_other_answer_of_a_server_is_one_error(routed, tmp_path, path):
    answer = Server()

    def use(url, folder):
        engine = vllm.VLLMServerEngine(ServedModel.of(routed), url, weights_folder=folder, timeout_s=5)
        engine.load_weights(routed.model.state_dict(), version=0)
        engine.generate([np.arange(8, dtype=np.int32)], Sampling(max_new_tokens=5, end_token=END), seeded())

    with serving(answer) as server:
        for number, value in enumerate(OTHER):
            answer.answers[path] = value
            with pytest.raises(EngineError) as caught:
                use(server.url, tmp_path / str(number))
            assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": [1.0, 2.0]}, "a list of integers"),
        ({"token_ids": [True]}, "a list of integers"),
        ({"token_ids": [1 << 40]}, "a list of integers"),
        ({"logprobs": {"token_logprobs": ["-1.5"]}}, "a list of numbers"),
        ({"logprobs": {"token_logprobs": [True]}}, "a list of numbers"),
        ({"logprobs": None}, "lacks or garbles"),
        ({"prompt_token_ids": [1.5]}, "a list of integers"),
        ({"finish_reason": None}, "lacks or garbles"),
        ({"finish_reason": "repetition"}, "for the reason 'repetition'"),
        ({"index": 1}, "expected each once"),
        ({"index": "0"}, "lacks or garbles"),
    ],
)
def test_a_completion_is_taken_as_it_is_or_not_at_all(change, said):
    record = payload(DATA / "completion.json")
    record["response"]["choices"][0] |= change
    with pytest.raises(EngineError, match=said):
        sequences_of(record["response"], np.array(record["request"]["prompt"], np.int32))


def test_a_response_that_the_server_aborted_is_no_whole_one(tmp_path):
    record, routed = payload(DATA / "completion_n2.json"), policy()
    record["response"]["choices"][1]["finish_reason"] = "abort"
    prompt = np.array(record["request"]["prompt"], np.int32)
    with serving(Server(**{"/v1/completions": record["response"]})) as server:
        engine = vllm.VLLMServerEngine(ServedModel.of(routed), server.url, weights_folder=tmp_path)
        engine.load_weights(routed.model.state_dict(), version=0)
        with pytest.raises(EngineError, match="aborted response 1 of 2"):
            engine.generate([prompt], Sampling(group_size=2, max_new_tokens=5, end_token=END), seeded())


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
        vllm.VLLMServerEngine(ServedModel.of(policy()), server.url, weights_folder=tmp_path)


def test_a_server_that_is_not_there(tmp_path):
    with pytest.raises(EngineError, match="Is it running"):
        vllm.VLLMServerEngine(ServedModel.of(policy()), "http://127.0.0.1:9", weights_folder=tmp_path)
    with pytest.raises(ConfigError, match="no address"):
        vllm.VLLMServerEngine(ServedModel.of(policy()), "127.0.0.1:8000", weights_folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_engine_with_another_tokenizer_is_refused():
    record = payload(DATA / "completion.json")
    prompt = np.array(record["request"]["prompt"], np.int32)
    served = ServedModel.of(policy())
    [sampled] = sequences_of(record["response"], prompt)
    sampled.trace(served, weight_version=0, engine="vllm", engine_version="0.30.0")
    for token in (served.vocabulary_size, -1):
        answer = copy.deepcopy(record["response"])
        answer["choices"][0]["token_ids"][1] = token
        [sampled] = sequences_of(answer, prompt)
        with pytest.raises(
            EngineError, match=rf"sampled token {token}, the policy knows those below 64.*another model"
        ):
            sampled.trace(served, weight_version=0, engine="vllm", engine_version="0.30.0")
    answer = copy.deepcopy(record["response"])
    answer["choices"][0]["prompt_token_ids"][0] += 1
    with pytest.raises(EngineError, match="a tokenizer or template of its own"):
        sequences_of(answer, prompt)


def test_log_probs_that_are_no_numbers_are_refused():
    record = payload(DATA / "completion.json")
    record["response"]["choices"][0]["logprobs"]["token_logprobs"][1] = None
    (sampled,) = sequences_of(record["response"], np.array(record["request"]["prompt"], np.int32))
    served = ServedModel.of(policy())
    with pytest.raises(EngineError, match="no finite number"):
        sampled.trace(served, weight_version=0, engine="vllm", engine_version="0.30.0")
