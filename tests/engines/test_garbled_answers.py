"""Recorded answers of servers, as they are, and with every field replaced: read, or refused as an error of ours."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from foreroute.adapters.checkpoint import ServedModel
from foreroute.capture import Sampling, decode
from foreroute.engines import sglang, vllm
from foreroute.engines.base import Request
from foreroute.engines.http import Answer
from foreroute.errors import CaptureError, EngineError
from tests.engines.recorded_answers import assert_routes, payload
from tests.engines.small_policy import END, SIZES

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
    sampling = Sampling(max_new_tokens=5, end_token=END, temperature=0.8)
    if engine == "vllm":
        answer, prompt = record["response"] | {"request_id": "r"}, record["request"]["token_ids"]
        answer["prompt_token_ids"] = prompt
    else:
        answer, prompt = record["response"], record["request"]["input_ids"]
        answer["meta_info"] |= {"id": "r", "weight_versions": [{"version": "default", "start": 0, "end": 5}]}
    request = Request("r", np.array(prompt, np.int32), sampling, 0)

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
