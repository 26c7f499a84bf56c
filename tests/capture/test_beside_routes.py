"""Log-probs of sampled tokens and spans of the weights that sampled them, beside routes and on disk."""

import json
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from foreroute.capture import Generation, decode, decode_generation, load_generation, save_generation
from foreroute.errors import CaptureError, TraceContentError, TraceFileError
from foreroute.trace import NO_VERSION
from tests import wires
from tests.traces import random_trace

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
ON_SETS = {"output_token_sampling_logprobs": LOGPROBS}
FORMS = {
    "completions": completion(token_logprobs=LOGPROBS, tokens=["a", "b", "c"]),
    "chat": completion(content=CONTENT),
    "text": json.dumps(completion(content=CONTENT)),
    "in process": in_process(STEPS),
    "sglang": wires.sglang_answer(R, output_token_logprobs=PAIRS),
    "sglang, truncated": wires.sglang_answer(R, output_token_logprobs=[[-7.0, None]] * 3, **ON_SETS),
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
        (completion(token_logprobs=[None, -1.0, -1.0]), r"log-prob None.*token"),
        (completion(token_logprobs=[-9999.0, -1.0, -1.0]), "log-prob -9999.0"),
        (completion(content=5), r"content.*read"),
        (in_process([{0: SimpleNamespace(logprob=-1.0)}] * 3), r"log-probs of \[0\]"),
        (wires.sglang_answer(R, output_token_logprobs=[[-1.0, 12345, None]] * 3), r"log-prob.*12345"),
        ({"choices": [CHOICE | {"token_ids": None, "prompt_token_ids": None}]}, r"prompt.*response apart"),
    ],
)
def test_log_probs_that_are_not_those_of_the_tokens_are_refused(answer, seen):
    with pytest.raises(CaptureError, match=seen):
        decode_generation(answer, model=R.spec, token_ids=R.tokens)


SPANNED = wires.rollout(np.random.default_rng(9), prompt=4, response=6)


def answer(spans, start=0):
    return wires.vllm_answer(SPANNED, start, weight_versions=spans)


def spans(*bounds, names="3458"):
    pairs = pairwise(bounds)
    return [{"version": names[i], "start": start, "end": end} for i, (start, end) in enumerate(pairs)]


@pytest.mark.parametrize(("bounds", "start"), [((0, 6), 2), ((0, 2, 6), 0), ((0, 1, 5, 6), 4), ((0, 1, 2, 3, 6), 2)])
def test_each_row_has_the_weights_of_the_token_that_it_produced(bounds, start):
    trace = decode(answer(spans(*bounds), start=start), model=SPANNED.spec, start=start, weight_version=int)
    of_token = [int("3458"[np.searchsorted(bounds, j, side="right") - 1]) for j in range(6)]
    # position p produced generated token p - 3; the prompt's other rows are not stated, and the last is absent
    expected = [of_token[p - 3] if p >= 3 and p >= start else NO_VERSION for p in range(9)] + [NO_VERSION]
    assert trace.weight_versions_N.tolist() == expected


def test_spans_of_an_answer_of_sglang():
    parsed = wires.sglang_answer(SPANNED, weight_versions=spans(0, 2, 6))
    trace = decode(parsed, model=SPANNED.spec, token_ids=SPANNED.tokens, weight_version=int)
    assert trace.weight_versions_N.tolist() == [-1] * 3 + [3] * 2 + [4] * 4 + [-1]
    with pytest.raises(CaptureError, match="and weight_version is 5"):
        decode(parsed, model=SPANNED.spec, token_ids=SPANNED.tokens, weight_version=5)


def test_a_number_stamps_all_rows_of_one_version_and_no_answer_of_two():
    assert decode(answer(spans(0, 6)), model=SPANNED.spec, weight_version=5).versions == (5,)
    assert decode(answer(spans(0, 2, 6)), model=SPANNED.spec).versions == (NO_VERSION,)
    with pytest.raises(CaptureError, match=r"generated.*'3', '4'.*weight_version.*5"):
        decode(answer(spans(0, 2, 6)), model=SPANNED.spec, weight_version=5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"not say.*weights"),
        (5, r"weight_versions.*read"),
        (spans(0, 5), r"weights.*5 of 6"),
        (spans(0, 4, 2, 6), r"spans.*follow"),
        ([{"version": 3, "start": 0, "end": 6}], r"names.*weights"),
        ([{"version": "3", "start": 0.0, "end": 6}], r"spans.*follow"),
        (spans(0, 6, names=["default"]), r"'default'.*no number"),
        (spans(0, 6, names=["-2"]), "weight_version is -2"),
    ],
)
def test_spans_that_cannot_be_are_refused(given, message):
    with pytest.raises(CaptureError, match=message):
        decode(answer(given), model=SPANNED.spec, weight_version=int)


def test_a_form_without_spans_is_refused_where_they_are_asked_for():
    with pytest.raises(CaptureError, match=r"say.*weights"):
        decode(wires.sglang(SPANNED), model=SPANNED.spec, token_ids=SPANNED.tokens, weight_version=int)


@pytest.fixture
def generation():
    trace = random_trace(5)
    trace = trace.select(np.flatnonzero(trace.lengths > 1))
    prompts = np.ones(len(trace), np.int64)
    return Generation(trace, prompts, -np.arange(int((trace.lengths - 1).sum()), dtype=np.float32))


def test_round_trip(tmp_path, generation):
    path = save_generation(generation, tmp_path / "rollout.safetensors")
    read = load_generation(path)
    assert read.trace.equals(generation.trace)
    assert np.array_equal(read.logprobs_R, generation.logprobs_R)
    assert np.array_equal(read.prompt_lengths, generation.prompt_lengths)
    assert [each.name for each in tmp_path.iterdir()] == ["rollout.safetensors"]
    with pytest.raises(TraceFileError, match="already exists"):
        save_generation(generation, path)


def test_what_tools_said_between_turns_is_kept(tmp_path, generation):
    lengths = generation.trace.lengths
    sampled = generation.sampled_N.copy()
    inner = int(generation.trace.offsets[0]) + int(generation.prompt_lengths[0]) + 1
    assert lengths[0] - generation.prompt_lengths[0] >= 3
    sampled[inner] = False
    talked = Generation(generation.trace, generation.prompt_lengths, np.delete(generation.logprobs_R, 1), sampled)
    path = save_generation(talked, tmp_path / "rollout.safetensors")
    read = load_generation(path)
    assert np.array_equal(read.sampled_N, sampled)
    assert np.array_equal(read.logprobs_R, talked.logprobs_R)
    both = Generation.concatenate([generation, talked]).select([len(generation), 0])
    assert both.response_lengths.tolist() == [generation.response_lengths[0] - 1, generation.response_lengths[0]]
    assert np.array_equal(both.response(0), np.delete(both.response(1), 1))


NO_LOGPROBS = r"floats \[\d+\].*sampled"
REFUSED = [
    ("trace", lambda trace: None, r"trace.*RoutingTrace"),
    *(
        ("prompt_lengths", lambda each, n=n: [n] * len(each), r"prompt.*response.*at least")
        for n in (1.5, True, 0, 2**63 - 1, None, [2, 3], 10**6)
    ),
    ("logprobs_R", lambda each: np.where(each == -1, np.nan, each), r"nan.*sampled token 1"),
    ("logprobs_R", lambda each: np.where(each == -1, 2e-3, each), r"0\.002.*sampled token 1"),
    *(("logprobs_R", make, NO_LOGPROBS) for make in (list, lambda each: each.astype(complex), lambda each: each[1:])),
    ("sampled_N", lambda each: each | True, r"token 0 of sequence 0, .*sampled"),
    ("sampled_N", lambda each: each & False, r"not said.*sampled"),
    ("sampled_N", lambda each: np.where(np.arange(len(each)) < len(each) - 1, each, False), r"not said.*sampled"),
    ("sampled_N", lambda each: each.astype(np.int8), "numpy, bool"),
    *(("sampled_N", lambda each, value=value: value, "sampled tokens") for value in ("x", [[True], [True, True]])),
]


@pytest.mark.parametrize(("name", "change", "words"), REFUSED)
def test_what_cannot_be_a_generation_is_refused(generation, name, change, words):
    given = {"trace": generation.trace, "prompt_lengths": generation.prompt_lengths}
    given |= {"logprobs_R": generation.logprobs_R, "sampled_N": generation.sampled_N}
    with pytest.raises(TraceContentError, match=words):
        Generation(**given | {name: change(given[name])})
