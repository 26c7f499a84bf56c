"""Spans of weights in answers: the row that produced a token is of the weights that the engine names for it."""

from itertools import pairwise

import numpy as np
import pytest

from foreroute.capture import decode
from foreroute.errors import CaptureError
from foreroute.trace import NO_VERSION
from tests import wires

R = wires.rollout(np.random.default_rng(9), prompt=4, response=6)


def answer(spans, start=0):
    return wires.vllm_answer(R, start, weight_versions=spans)


def spans(*bounds, names="3458"):
    pairs = pairwise(bounds)
    return [{"version": names[i], "start": start, "end": end} for i, (start, end) in enumerate(pairs)]


@pytest.mark.parametrize(("bounds", "start"), [((0, 6), 2), ((0, 2, 6), 0), ((0, 1, 5, 6), 4), ((0, 1, 2, 3, 6), 2)])
def test_each_row_has_the_weights_of_the_token_that_it_produced(bounds, start):
    trace = decode(answer(spans(*bounds), start=start), model=R.spec, start=start, weight_version=int)
    of_token = [int("3458"[np.searchsorted(bounds, j, side="right") - 1]) for j in range(6)]
    # position p produced generated token p - 3; the prompt's other rows are not stated, and the last is absent
    expected = [of_token[p - 3] if p >= 3 and p >= start else NO_VERSION for p in range(9)] + [NO_VERSION]
    assert trace.weight_versions_N.tolist() == expected


def test_spans_of_an_answer_of_sglang():
    parsed = wires.sglang_answer(R, weight_versions=spans(0, 2, 6))
    trace = decode(parsed, model=R.spec, token_ids=R.tokens, weight_version=int)
    assert trace.weight_versions_N.tolist() == [-1] * 3 + [3] * 2 + [4] * 4 + [-1]
    with pytest.raises(CaptureError, match="and weight_version is 5"):
        decode(parsed, model=R.spec, token_ids=R.tokens, weight_version=5)


def test_a_number_stamps_all_rows_of_one_version_and_no_answer_of_two():
    assert decode(answer(spans(0, 6)), model=R.spec, weight_version=5).versions == (5,)
    assert decode(answer(spans(0, 2, 6)), model=R.spec).versions == (NO_VERSION,)
    with pytest.raises(CaptureError, match=r"generated.*'3', '4'.*weight_version.*5"):
        decode(answer(spans(0, 2, 6)), model=R.spec, weight_version=5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "does not say which weights"),
        (5, "weight_versions cannot be read"),
        (spans(0, 5), "states the weights of 5 of 6"),
        (spans(0, 4, 2, 6), "spans that follow each other"),
        ([{"version": 3, "start": 0, "end": 6}], "expected names of weights"),
        ([{"version": "3", "start": 0.0, "end": 6}], "spans that follow each other"),
        (spans(0, 6, names=["default"]), "have no number"),
        (spans(0, 6, names=["-2"]), "weight_version is -2"),
    ],
)
def test_spans_that_cannot_be_are_refused(given, message):
    with pytest.raises(CaptureError, match=message):
        decode(answer(given), model=R.spec, weight_version=int)


def test_a_form_without_spans_is_refused_where_they_are_asked_for():
    with pytest.raises(CaptureError, match=r"say.*weights"):
        decode(wires.sglang(R), model=R.spec, token_ids=R.tokens, weight_version=int)
