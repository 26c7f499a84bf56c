"""Log-probs of sampled tokens, in each form in which an engine states them beside its routes."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from foreroute.capture import decode, decode_generation
from foreroute.errors import CaptureError
from tests import wires

R = wires.rollout(np.random.default_rng(16), prompt=4, response=3)
LOGPROBS = [-1.25, -0.5, -2.0]
CHOICE = wires.vllm_answer(R)["choices"][0]
PAIRS = [[value, token, None] for value, token in zip(LOGPROBS, R.response, strict=True)]


def completion(**logprobs):
    return {"choices": [CHOICE | {"logprobs": logprobs or None}]}


def in_process(steps):
    choice = SimpleNamespace(token_ids=R.response, routed_experts=R.all_layers(), logprobs=steps)
    return SimpleNamespace(prompt_token_ids=R.prompt, outputs=[choice])


STEPS = [{token: SimpleNamespace(logprob=value), 0: SimpleNamespace(logprob=-9.0)} for value, token, _ in PAIRS]
CONTENT = [{"token": "x", "logprob": value} for value in LOGPROBS]
FORMS = {
    "completions": completion(token_logprobs=LOGPROBS, tokens=["a", "b", "c"]),
    "chat": completion(content=CONTENT),
    "text": json.dumps(completion(content=CONTENT)),
    "in process": in_process(STEPS),
    "sglang": wires.sglang_answer(R, output_token_logprobs=PAIRS),
    "sglang, truncated": wires.sglang_answer(
        R, output_token_logprobs=[[-7.0, None]] * 3, output_token_sampling_logprobs=LOGPROBS
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_generation(form):
    generation = decode_generation(FORMS[form], model=R.spec, token_ids=R.tokens, weight_version=3)
    trace = decode(FORMS[form], model=R.spec, token_ids=R.tokens, weight_version=3)
    assert generation.trace.equals(trace)
    assert generation.logprobs_R.tolist() == LOGPROBS
    assert generation.prompt_lengths.tolist() == [4]


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (completion(), "0 log-probs for 3"),
        (completion(token_logprobs=[None, *LOGPROBS]), "4 log-probs for 3"),  # with echo
        (completion(token_logprobs=[None, -1.0, -1.0]), "log-prob None of token"),
        (completion(token_logprobs=[-9999.0, -1.0, -1.0]), "log-prob -9999.0"),
        (completion(content=5), "content cannot be read"),
        (in_process([{0: SimpleNamespace(logprob=-1.0)}] * 3), r"log-probs of \[0\]"),
        (wires.sglang_answer(R, output_token_logprobs=[[-1.0, 12345, None]] * 3), "log-prob of token 12345"),
        ({"choices": [CHOICE | {"token_ids": None, "prompt_token_ids": None}]}, "prompt and response apart"),
    ],
)
def test_log_probs_that_are_not_those_of_the_tokens_are_refused(answer, seen):
    with pytest.raises(CaptureError, match=seen):
        decode_generation(answer, model=R.spec, token_ids=R.tokens)
