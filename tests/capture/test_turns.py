"""Captures of turns, joined, against a list of (token, version, ids or None) that is grown one row at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute.errors import BatchMismatchError, SpecMismatchError
from foreroute.trace import NO_VERSION, RoutingTrace, extended
from tests.traces import spec_of

SPEC = spec_of()


def routes(rng, rows):
    return np.argsort(rng.random((rows, SPEC.num_layers, SPEC.num_experts)), axis=-1)[..., : SPEC.top_k]


def turn(tokens, rows, start=0, versions=NO_VERSION):
    """A capture that has the rows of some positions alone."""
    whole, valid = np.zeros((len(tokens), *np.shape(rows)[1:]), int), np.zeros(len(tokens), bool)
    versions_T, here = np.full(len(tokens), NO_VERSION), slice(start, start + len(rows))
    whole[here], valid[here], versions_T[here] = rows, True, versions
    return RoutingTrace.from_rows(SPEC, [tokens], [whole], valid=[valid], weight_versions=[versions_T])


@settings(max_examples=50)
@given(st.data())
def test_turns_match_the_oracle(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    trace, slow, tokens, turns = RoutingTrace.unrouted(SPEC, [[]]), [], np.zeros(0, int), []
    for _ in range(data.draw(st.integers(1, 5))):
        last = len(tokens) - 1
        tokens = np.concatenate([tokens, rng.integers(0, 99, data.draw(st.integers(0, 6)))])
        start = data.draw(st.integers(0, len(tokens)))
        rows = routes(rng, data.draw(st.integers(0, len(tokens) - start)))
        versions = rng.integers(0, 4, len(rows))
        turns.append(turn(tokens, rows, start, versions))
        trace = extended(trace, turns[-1])
        slow += [(int(token), None, NO_VERSION) for token in tokens[len(slow) :]]
        for place, row, version in zip(range(start, len(tokens)), rows.tolist(), versions.tolist(), strict=False):
            if slow[place][1] is None or place == last:  # which gave no token of an earlier capture
                slow[place] = (slow[place][0], row, version)
    columns = (trace.token_ids_N, trace.expert_ids_NLK, trace.valid_N, trace.weight_versions_N)
    seen = [(t, ids if valid else None, v) for t, ids, valid, v in zip(*(c.tolist() for c in columns), strict=True)]
    assert seen == slow
    assert extended(*turns).equals(trace), "all turns in one call"


def test_what_does_not_continue_is_refused():
    rng = np.random.default_rng(3)
    start = turn([1, 2, 3], routes(rng, 2))
    with pytest.raises(BatchMismatchError, match=r"9.*position 1.*earlier.*2"):
        extended(start, turn([1, 9, 3, 4], routes(rng, 3)))
    with pytest.raises(BatchMismatchError, match="none shorter"):
        extended(start, turn([1, 2], routes(rng, 1)))
    with pytest.raises(BatchMismatchError, match="many"):
        extended(start, RoutingTrace.unrouted(SPEC, [[1, 2, 3], [2]]))
    with pytest.raises(SpecMismatchError):
        extended(start, RoutingTrace.unrouted(spec_of(num_experts=16), [[1, 2, 3]]))
    assert extended(start, start).equals(start)
