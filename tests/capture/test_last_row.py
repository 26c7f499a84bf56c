"""The last token was sampled and never fed: what stands for it in a capture is no route, whoever made it up."""

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import decode
from foreroute.trace import extended
from tests import wires

R = wires.rollout(np.random.default_rng(14), layers=6, prompt=6, response=6)
KNOWN = fr.RoutingTrace.from_sequences(R.spec, [R.tokens], [R.routes_RLK], weight_version=1)
MADE_UP = {
    "the first experts": np.tile(np.arange(3), (6, 1)),
    "the row before": R.routes_RLK[-1],
    "any row": R.routes_RLK[4],
    "zeros": np.zeros((6, 3), int),
    "no ids": np.full((6, 3), 99),
    "-1 in part": np.full((6, 3), [-1, 2, 3]),
}


def with_last(row):
    return np.concatenate([R.routes_RLK, row[None]])


@pytest.mark.parametrize("row", MADE_UP.values(), ids=MADE_UP)
def test_a_row_for_the_last_token_is_no_route(row):
    rows = with_last(row)
    for output in (rows, rows.tolist(), wires.npy(rows.astype("<i4")), [rows]):
        assert decode(output, model=R.spec, token_ids=[R.tokens], weight_version=1).equals(KNOWN)
    said = decode(rows, model=R.spec, token_ids=R.tokens, weight_version=1, valid=np.ones(12, bool))
    assert said.equals(KNOWN)  # nor when the caller says so


@pytest.mark.parametrize("row", [MADE_UP["the first experts"], MADE_UP["the row before"]], ids=["first", "before"])
def test_the_next_turn_brings_the_row_that_was_computed(row):
    rng = np.random.default_rng(15)
    more = wires.rollout(rng, layers=6, prompt=2, response=3)
    rows = np.concatenate([R.routes_RLK, more.routes_RLK, more.routes_RLK[:1]])
    earlier = decode(with_last(row), model=R.spec, token_ids=R.tokens, weight_version=1)
    later = decode(rows, model=R.spec, token_ids=R.tokens + more.tokens[:4], weight_version=2)
    joined = extended(earlier, later)
    assert joined.weight_versions_N.tolist() == [1] * 11 + [2] * 4 + [-1]
    assert np.array_equal(joined.expert_ids_NLK[:15], rows[:15])


def test_a_trace_whose_last_token_was_fed_gives_way_where_the_next_turn_has_its_row():
    """Its log-prob came from nowhere; that of the token behind it came from the later turn."""
    earlier = fr.RoutingTrace.from_sequences(R.spec, [R.tokens[:4]], [R.routes_RLK[:4]], weight_version=1)
    later = fr.RoutingTrace.from_sequences(R.spec, [R.tokens], [R.routes_RLK[::-1]], weight_version=2)
    assert extended(earlier, later).weight_versions_N.tolist() == [1] * 3 + [2] * 8 + [-1]
    late = decode(R.routes_RLK[4:], model=R.spec, token_ids=R.tokens, start=4, weight_version=2)
    joined = extended(earlier, late)  # which skipped it
    assert joined.weight_versions_N.tolist() == [1] * 4 + [2] * 7 + [-1]
    assert joined.expert_ids_NLK.tolist() == KNOWN.expert_ids_NLK.tolist()


def test_a_prompt_of_which_one_token_was_asked_has_all_its_rows():
    """`max_tokens=1`: P rows for P + 1 tokens. Who leaves the sampled token out loses a row of no use."""
    rows, prompt = R.routes_RLK[:6], R.prompt
    assert decode(rows, model=R.spec, token_ids=[*prompt, 7]).valid_N.tolist() == [True] * 6 + [False]
    assert decode(rows, model=R.spec, token_ids=prompt).valid_N.tolist() == [True] * 5 + [False]
    assert fr.RoutingTrace.from_sequences(R.spec, [prompt], [rows]).valid_N.all()  # rows as they are stated
