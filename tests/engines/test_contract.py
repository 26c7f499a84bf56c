"""What every engine must do: one table, run by the embedded engine and by the clients of vLLM's and SGLang's servers.

A client does not believe its server. What a server may say that is not so is told in words of no engine, and written
into the recorded answers of each; and any field of an answer may be anything.
"""

import copy
import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from foreroute.adapters.checkpoint import ServedModel
from foreroute.capture import decode
from foreroute.engines import sglang, vllm
from foreroute.engines.base import Request
from foreroute.engines.embedded import EmbeddedEngine
from foreroute.engines.http import Answer
from foreroute.errors import CaptureError, ConfigError, EngineError
from foreroute.trace import SAMPLING
from foreroute.train import parse_config
from foreroute.train.policy import make_engine
from tests.engines.recorded_answers import assert_routes, payload, serving
from tests.engines.sglang import test_sglang as of_sglang
from tests.engines.small_policy import END, SAMPLED, SIZES, policy, seeded
from tests.engines.vllm import test_engine as of_vllm
from tests.tiers import grid
from tests.traces import sets_of

PROMPTS = [of_vllm.PROMPT, of_vllm.PROMPT[::-1].copy()]


class VLLM:
    """Its client, its server, and how one answer of it says what it says."""

    client = vllm.VLLMEngine
    server = partial(of_vllm.Server, "generate_masks", **{of_vllm.INFO: {"vllm_config": of_vllm.MASKED}})

    @staticmethod
    def changed(lie, answer):
        (choice,) = answer["choices"]
        steps = choice["logprobs"]["content"]
        said = {
            "id": answer["request_id"],
            "prompt": answer["prompt_token_ids"],
            "tokens": choice["token_ids"],
            "steps": [(step["logprob"], token) for step, token in zip(steps, choice["token_ids"], strict=True)],
            "reason": choice["finish_reason"],
            "weights": None,
        }
        lie(said)
        answer |= {"request_id": said["id"], "prompt_token_ids": said["prompt"]}
        choice |= {"token_ids": said["tokens"], "finish_reason": said["reason"], "weight_versions": said["weights"]}
        choice["logprobs"]["content"] = [{"token": f"token_id:{token}", "logprob": own} for own, token in said["steps"]]


class SGLang:
    client, server = sglang.SGLangServerEngine, of_sglang.Server

    @staticmethod
    def changed(lie, answer):
        meta = answer["meta_info"]
        said = {
            "id": meta["id"],
            "prompt": [0] * meta["prompt_tokens"],
            "tokens": answer["output_ids"],
            "steps": [(own, token) for own, token, _ in meta["output_token_logprobs"]],
            "reason": meta["finish_reason"]["type"],
            "weights": meta["weight_versions"],
        }
        lie(said)
        answer["output_ids"] = said["tokens"]
        meta |= {"id": said["id"], "weight_versions": said["weights"], "finish_reason": {"type": said["reason"]}}
        meta |= {"prompt_tokens": said["prompt"] and len(said["prompt"])}
        meta |= {"output_token_logprobs": [[own, token, None] for own, token in said["steps"]]}


SERVED = {"vllm": VLLM, "sglang": SGLang}


@pytest.fixture(scope="module")
def routed():
    return policy()


@contextmanager
def open_engine(name, routed, folder):
    """An engine, and its server where it has one."""
    if name == "embedded":
        yield EmbeddedEngine(routed.model, "float32"), None
        return
    server = SERVED[name].server()
    with serving(server) as at:
        yield SERVED[name].client(ServedModel.of(routed), at.url, weights_folder=folder, timeout_s=5), server


@pytest.fixture(params=["embedded", *SERVED])
def engine(request, routed, tmp_path):
    with open_engine(request.param, routed, tmp_path) as (engine, _):
        yield engine
        engine.close()
        engine.close()


def test_each_request_is_answered_in_order_under_the_weights_that_were_loaded_last(engine, routed):
    for version in (3, 7):
        engine.load_weights(routed.model.state_dict(), version)
        assert engine.weight_version == version
        got = engine.generate(PROMPTS, replace(SAMPLED, group_size=2), seeded())
        trace = got.trace
        assert [trace.tokens(s)[:8].tolist() for s in range(4)] == [PROMPTS[s // 2].tolist() for s in range(4)]
        assert got.prompt_lengths.tolist() == [8] * 4
        assert trace.versions == (version,)
        assert np.flatnonzero(~trace.valid_N).tolist() == (trace.offsets[1:] - 1).tolist()
        assert 1 <= got.response_lengths.min() <= got.response_lengths.max() <= 5
        assert len(got.logprobs_R) == got.response_lengths.sum()
        assert (got.logprobs_R <= 0).all()
        assert not trace.streams


def test_sets_come_where_tokens_are_left_out(engine, routed):
    engine.load_weights(routed.model.state_dict(), 3)
    got = engine.generate(PROMPTS[:1], replace(SAMPLED, top_p=0.9), seeded())
    sets = sets_of(got.trace.streams[SAMPLING])
    assert [row for row, each in enumerate(sets) if each] == [*range(7, 7 + got.response_lengths[0])]
    assert all(token in ids for token, (ids,) in zip(got.response(0).tolist(), sets[7:-1], strict=True))
    assert not engine.generate(PROMPTS[:1], replace(SAMPLED, temperature=0), seeded()).trace.streams


@pytest.mark.parametrize("prompts", [[], [PROMPTS[0], PROMPTS[0][:0]]])
def test_nothing_to_go_on_from_is_refused(engine, prompts):
    with pytest.raises(ConfigError, match=r"prompts.*tokens"):
        engine.generate(prompts, SAMPLED, seeded())


@pytest.mark.parametrize("name", SERVED)
def test_a_configuration_names_the_server(name, routed, tmp_path):
    with serving(SERVED[name].server()) as at:
        place = {"url": at.url, "weights_folder": str(tmp_path / "weights"), "timeout_s": 5.0}
        values = {"name": "x", "rollout": {"engine": name, "server": place}}
        with make_engine(parse_config(values, source="this test"), routed) as engine:
            engine.load_weights(routed.model.state_dict(), version=3)
            trace = engine.generate(PROMPTS, SAMPLED, seeded()).trace
    assert (trace.versions, trace.provenance["engine"]) == ((3,), name)


def stated(**changes):
    return lambda said: said.update(changes)


def step(position, *, logprob=None, token=None):
    """Another log-prob at a place of the response, or that of another token."""

    def change(said):
        own, named = said["steps"][position]
        said["steps"][position] = (own, token) if token is not None else (logprob, named)

    return change


def sampled(position, token):
    """Another token at a place of the response, consistently."""

    def change(said):
        said["tokens"][position] = token
        said["steps"][position] = (said["steps"][position][0], token)

    return change


def lengthened(by):
    """More tokens, or fewer, consistently but for the routes."""

    def change(said):
        for name in ("tokens", "steps"):
            said[name] = said[name][: len(said[name]) + min(by, 0)] + said[name][: max(by, 0)]

    return change


def of_the_first():
    """The id of the answer that was given first, though prompts have one length."""
    ids = []

    def change(said):
        ids.append(said["id"])
        said["id"] = ids[0]

    return change


LIES = {
    # of another request, prompt or sequence
    "an answer given twice": (of_the_first(), r"answers the.*request"),
    "another id": (stated(id="x"), r"answers.*'x'"),
    "another prompt": (stated(prompt=[1, 2, 3]), r"tokenizer or.*template|prompt of 3.*sent 8"),
    "log-probs of other tokens": (step(1, token=9), r"token.*each log-prob"),
    "a log-prob too few": (lambda said: said["steps"].pop(), r"token.*each log-prob"),
    "other weights": (stated(weights=[{"version": "2", "start": 0, "end": 5}]), "version 2, .* loaded version 3"),
    # tokens and ends that cannot be
    "token 64": (sampled(1, 64), r"token 64.*below 64"),
    "token -1": (sampled(1, -1), r"list of.*integers|sampled token -1"),
    "too many": (lengthened(3), r"8 tokens.*asked.*1 to 5"),
    "none": (lengthened(-5), "sampled 0 tokens"),
    "behind the end": (sampled(1, END), r"3 tokens behind.*end token 3"),
    "stop without an end": (lambda said: (sampled(4, 9)(said), stated(reason="stop")(said)), r"ended.*end token"),
    "length too early": (lengthened(-2), r"length after 3 of 5"),
    "aborted": (stated(reason="abort"), r"aborted.*someone else"),
    # log-probs that cannot be; of other types are those of test_garbled_answers.py
    **{f"log-prob {value}": (step(2, logprob=value), "the log-prob") for value in (1.1e-3, -9999.0, None)},
}


@pytest.fixture(scope="module", params=SERVED)
def asked(request, routed, tmp_path_factory):
    with open_engine(request.param, routed, tmp_path_factory.mktemp("weights")) as (engine, server):
        engine.load_weights(routed.model.state_dict(), version=3)

        def ask(lie=lambda said: None):
            server.lie = partial(SERVED[request.param].changed, lie)
            return engine.generate(PROMPTS, SAMPLED, seeded())

        yield ask
        engine.close()


@grid("lie", LIES, quick=8)
def test_an_answer_that_is_none_to_its_question_is_refused(asked, lie):
    told, said = LIES[lie]
    assert len(asked()) == 2  # the control: without the lie it is taken
    with pytest.raises((EngineError, CaptureError), match=said):
        asked(told)


DATA = Path(__file__).parent
WRONG = [None, True, -1, 1.5, float("nan"), 10**400, "x", "7" * 5000, [], [[]], [None], {}, {"x": 1}]


def places(value, path=()):
    """The path of everything in a JSON value."""
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield from places(part, (*path, name))


def replaced(value, path, by):
    if not path:
        return by
    changed = copy.deepcopy(value)
    inner = changed
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = by
    return changed


def recorded(engine):
    """A recorded answer with its request, and what reads both."""
    record = payload(DATA / engine / "data" / "generate.json")
    served = ServedModel(record["spec"], None, 64)
    if engine == "vllm":
        answer, prompt = record["response"] | {"request_id": "r"}, record["request"]["token_ids"]
        answer["prompt_token_ids"] = prompt
    else:
        answer, prompt = record["response"], record["request"]["input_ids"]
        answer["meta_info"] |= {"id": "r", "weight_versions": [{"version": "default", "start": 0, "end": 5}]}
    request = Request("r", np.array(prompt, np.int32), SAMPLED, 0)

    def read(value):
        found = Answer(value, "the answer")
        if engine == "vllm":
            response = vllm.read_response(found, request, echoes=True)
        else:
            response = sglang.read_response(found, request)
        return response.to_trace(request, served, loaded=()), response.logprobs

    return json.loads(json.dumps(answer)), read


@pytest.mark.parametrize("path", sorted(DATA.glob("*/data/*.json")), ids=lambda path: f"{path.parts[-3]} {path.stem}")
def test_recorded_answers_decode_to_the_routes_of_the_model(path):
    record = payload(path)
    asked = record["request"]
    start = asked.get("routed_experts_prompt_start", asked.get("routed_experts_start_len", 0))
    known = {"model": record["spec"], "vocabulary_size": SIZES["vocab_size"], "token_ids": record["tokens"]}
    trace = decode(record["response"], **known, start=start)
    assert_routes(trace, record, start=start)
    assert trace.provenance["wire"] == path.parts[-3]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_field_of_an_answer_may_be_anything(engine):
    answer, read = recorded(engine)
    (known, _), refused = read(copy.deepcopy(answer)), set()
    for path in places(answer):
        for wrong in WRONG:
            try:
                trace, logprobs = read(replaced(answer, path, wrong))
            except (EngineError, CaptureError):
                refused.add(path)
            else:
                assert np.array_equal(trace.token_ids_N, known.token_ids_N)
                assert np.array_equal(trace.expert_ids_NLK, known.expert_ids_NLK)
                assert (logprobs <= 1e-3).all()
    needed = ("choices", 0, "logprobs", "content", 2) if engine == "vllm" else ("meta_info", "output_token_logprobs", 2)
    assert {needed} < refused  # the control
