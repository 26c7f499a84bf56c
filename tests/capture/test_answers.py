"""Answers that lack routes, have them in two fields, or begin at different positions."""

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import decode
from foreroute.errors import CaptureError
from tests import wires

RNG = np.random.default_rng(16)
R = wires.rollout(RNG, prompt=4, response=3)
OTHER = wires.rollout(RNG, prompt=6, response=4)
KNOWN, OTHER_KNOWN = (fr.RoutingTrace.from_sequences(r.spec, [r.tokens], [r.routes_RLK]) for r in (R, OTHER))


def test_an_aborted_choice_that_has_rows_is_read():
    """Those of the prompt, of which all but the last row produced a token of it."""
    text = wires.npy_text(R.all_layers()[:3].astype(np.uint8))
    answer = wires.vllm_answer(R, finish_reason="abort", token_ids=[], routed_experts=text)
    trace = decode(answer, model=R.spec)
    assert trace.equals(KNOWN.truncated([3]).continued_by(fr.RoutingTrace.unrouted(R.spec, [R.prompt[3:]])))


def split(r, write, **changes):
    """As vLLM 0.21 answers: a row for each token of the prompt, and one for each sampled token but the last."""
    prompt, rows = r.routes_RLK[: len(r.prompt)], r.routes_RLK[len(r.prompt) :]
    answer = {"index": 0, "token_ids": r.response, "routed_experts": write(rows), **changes}
    return {"prompt_token_ids": r.prompt, "prompt_routed_experts": write(prompt), "choices": [answer]}


WRITERS = {
    "lists": np.ndarray.tolist,
    "arrays": lambda rows: rows.astype(np.int16),
    "base64": lambda rows: wires.npy_text(rows.astype(np.uint8)),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_routes_of_prompt_and_output_in_two_fields_are_joined(write):
    assert decode(split(R, write), model=R.spec).equals(KNOWN)
    both = decode([split(R, write), split(OTHER, write)], model=R.spec)
    assert both.equals(fr.concatenate([KNOWN, OTHER_KNOWN]))
    moved = split(R, write)
    moved["choices"][0]["prompt_routed_experts"] = moved.pop("prompt_routed_experts")
    assert decode(moved, model=R.spec).equals(KNOWN), "a proxy may put it into the choice, where vLLM does not"


def test_fields_that_do_not_join_are_refused():
    for change, match in (
        ({"prompt_routed_experts": R.routes_RLK[:3]}, r"\(3, 4, 3\) for a prompt of 4 tokens"),
        ({"prompt_routed_experts": R.routes_RLK[:4, :3]}, r"\(2, 4, 3\) behind it"),
        ({"prompt_routed_experts": 5}, "routed_experts of choice 0 is a int"),
    ):
        with pytest.raises(CaptureError, match=match):
            decode(split(R, np.ndarray.tolist) | change, model=R.spec)
    alone = split(R, np.ndarray.tolist)
    del alone["prompt_routed_experts"]
    with pytest.raises(CaptureError, match=r"2 rows .*prompt_routed_experts.*start="):
        decode(alone, model=R.spec)
    with pytest.raises(CaptureError, match=r"5 rows for 7.*: pass start="):
        decode(split(R, np.ndarray.tolist, routed_experts=R.routes_RLK[4:5]), model=R.spec)


@pytest.mark.parametrize("kind", [list, np.array])
def test_each_sequence_may_have_a_start_of_its_own(kind):
    answers = [wires.vllm_http(R, 3), wires.vllm_http(OTHER, 1)]
    trace = decode(answers, model=R.spec, start=kind([3, 1]))
    assert np.flatnonzero(trace.valid_N).tolist() == [*range(3, 6), *range(8, 16)]
