"""Sampling masks in the forms of vLLM and SGLang: on the right rows, in one order, or refused."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from foreroute.capture import decode
from foreroute.errors import CaptureError
from foreroute.trace import SAMPLING
from tests import wires
from tests.traces import sets_of

VOCABULARY = 50_000
R = wires.rollout(np.random.default_rng(5), prompt=7, response=5)
MODEL = {"model": R.spec, "vocabulary_size": VOCABULARY}


def sets_for(response, seed=0):
    """A set for each token, with it, in no order; that of the first token has no other."""
    rng = np.random.default_rng(seed)
    sizes = [1, *rng.integers(2, 9, len(response) - 1)]
    others = [rng.choice(VOCABULARY, size - 1, replace=False).tolist() for size in sizes]
    return [rng.permutation([*{*few, token}]).tolist() for few, token in zip(others, response, strict=True)]


def vllm(r, sets, make=sorted):
    output = wires.vllm_narrow(r)
    output.outputs[0].sampling_mask = SimpleNamespace(token_ids=[make(ids) for ids in sets])
    return output


vllm_arrays = partial(vllm, make=partial(np.array, dtype=np.int32))


def vllm_http(r, sets):
    return json.dumps(wires.vllm_answer(r, sampling_mask=sets))


def sglang(r, sets):
    return json.dumps(wires.sglang_answer(r, output_token_sampling_mask=sets) | {"prompt_token_ids": r.prompt})


FORMS = [vllm, vllm_arrays, vllm_http, sglang]


@pytest.mark.parametrize("form", FORMS)
def test_row_p_has_the_set_that_token_p_1_was_drawn_from(form):
    sets = sets_for(R.response)
    trace = decode(form(R, sets), **MODEL)
    assert sets_of(trace.streams[SAMPLING]) == [None] * 6 + [[sorted(ids)] for ids in sets] + [None]
    assert trace.streams[SAMPLING].num_choices == VOCABULARY
    bare = decode(wires.vllm_narrow(R), model=R.spec)
    assert trace.without_streams().equals(bare)
    with pytest.raises(CaptureError, match=r"vocabulary.*known"):
        decode(form(R, sets), model=R.spec)


def changed(position, value):
    def change(sets):
        return [*sets[:position], value, *sets[position + 1 :]]

    return change


REFUSED = {
    "too few": (lambda sets: sets[1:], r"4 sampling masks, 12 tokens.*5 of"),
    "shifted": (lambda sets: sets[-1:] + sets[:-1], "leave out.*position"),
    "empty": (changed(1, []), r"mask.*row 7.*empty"),
    "an id twice": (lambda sets: changed(1, [sets[1][0], *sets[1]])(sets), "twice"),
    "an id of no token": (lambda sets: changed(1, [VOCABULARY, *sets[1]])(sets), "expected 0 to 49999"),
    "a huge id": (lambda sets: changed(1, [2**70, *sets[1]])(sets), r"list.*token ids.*each"),
    "truth values": (changed(1, [True]), r"list.*token ids"),
    "a number": (lambda sets: 3, "is a int; expected a list"),
}


@pytest.mark.parametrize("form", [vllm_http, sglang])
@pytest.mark.parametrize("broken", REFUSED)
def test_masks_that_cannot_be_are_refused(form, broken):
    change, message = REFUSED[broken]
    with pytest.raises(CaptureError, match=message):
        decode(form(R, change(sets_for(R.response))), **MODEL)


@pytest.mark.parametrize("others", [0, 1])
def test_a_response_without_a_prompt_has_no_row_for_its_first_mask(others):
    """The row before its first token would be the last of another sequence."""
    bare = replace(R, prompt=[], response=R.tokens)
    answers = [vllm(R, sets_for(R.response))] * others + [vllm(bare, sets_for(bare.response))]
    with pytest.raises(CaptureError, match=f"sequence {others} has 12 sampling masks, 12 .* 12 of them.*a prompt of"):
        decode(answers, **MODEL)
