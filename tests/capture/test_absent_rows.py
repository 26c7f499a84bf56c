"""Rows without a route: only at the end where a form fills with zeros, anywhere where it says -1, never all of them."""

import base64
import json

import numpy as np
import pytest

from benchmarks.harness import wires
from foreroute.capture import ModelFacts, WireKind, decode, encode
from foreroute.errors import CaptureError
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace

R = wires.rollout(np.random.default_rng(9))


def prime_rl(absent):
    table = json.loads(wires.prime_rl(R))
    rows = R.all_layers().astype(np.uint8)
    rows[absent] = 0
    return {**table, "data": base64.b64encode(rows.tobytes()).decode()}


def verl(absent):
    batch = wires.verl([R])
    batch["routed_experts"][0, absent] = 0
    return batch


def minus_one(absent):
    rows = R.routes_RLK.copy()
    rows[absent] = -1
    return rows


FILLED = {"prime-rl": prime_rl, "verl": verl}


def decoded(output):
    return decode(output, model=R.facts, token_ids=[R.tokens])


@pytest.mark.parametrize("form", FILLED)
def test_rows_of_zeros_at_the_end_are_absent(form):
    assert np.flatnonzero(~decoded(FILLED[form]([8, 9, 10])).valid_N).tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("form", FILLED)
@pytest.mark.parametrize("absent", [[0], [4], [0, 1, 2, 3, 4], [3, 5, 10], list(range(10))])
def test_rows_of_zeros_before_a_routed_row_are_refused(form, absent):
    first = absent[0]
    with pytest.raises(CaptureError, match=rf"no route at position {first}, and one at position \d+.*only at the end"):
        decoded(FILLED[form](absent))


@pytest.mark.parametrize("form", FILLED)
def test_nothing_but_zeros_is_refused(form):
    with pytest.raises(CaptureError, match=r"nothing but zeros|none of its 11 rows"):
        decoded(FILLED[form](slice(0, 11)))


def test_a_table_of_zeros_beside_others_is_refused_too():
    with pytest.raises(CaptureError, match=r"sequence 1 .*nothing but zeros"):
        decode([prime_rl([]), prime_rl(slice(0, 11))], model=R.facts, token_ids=[R.tokens] * 2)


def test_a_sequence_that_fills_a_verl_batch_up_is_absent_as_a_whole():
    batch = wires.verl([R, R])
    batch["routed_experts"][1] = 0
    trace = decode(batch, model=R.facts)
    assert trace.select([0]).valid_N.sum() == 11
    assert not trace.select([1]).valid_N.any()


@pytest.mark.parametrize("absent", [[0], [4, 5], [10]])
def test_rows_of_minus_one_may_be_absent_anywhere(absent):
    for output in (minus_one(absent), minus_one(absent).tolist()):
        assert np.flatnonzero(~decoded(output).valid_N).tolist() == [*absent, 11]


def test_a_capture_without_any_route_is_refused():
    for output in (minus_one(slice(None)), minus_one(slice(None)).tolist(), wires.nemo_rl(R, np.ones(12, bool))):
        with pytest.raises(CaptureError, match="none of its 11 rows has a route"):
            decoded(output)
    assert decode(np.zeros((0, 4, 3), int), model=R.facts, token_ids=[[1]]).num_rows == 1


def with_gaps(valid, top_k=2):
    spec = RoutingSpec(4, top_k, (RoutedLayer(0), RoutedLayer(1)))
    valid = np.array(valid)
    ids = np.argsort(np.random.default_rng(0).random((len(valid), 2, 4)), axis=-1)[..., :top_k]
    return RoutingTrace.from_rows(
        spec, [list(range(len(valid)))], [ids], valid=[valid], weight_versions=[np.where(valid, 3, -1)]
    )


def test_gaps_are_written_only_where_they_are_read_back():
    trailing, middle = with_gaps([True, True, False, False]), with_gaps([True, False, True, False])
    (table,) = encode(trailing, WireKind.PRIME_RL)
    assert decode(table, model=trailing.spec, token_ids=[[0, 1, 2, 3]], weight_version=3).equals(trailing)
    with pytest.raises(CaptureError, match=r"no route at position 1, which prime-rl cannot say.*nemo-rl or skyrl"):
        encode(middle, WireKind.PRIME_RL)
    none = with_gaps(np.zeros(4, bool))
    with pytest.raises(CaptureError, match="no route at position 0"):
        encode(none, WireKind.PRIME_RL)
    facts = ModelFacts(none.spec)
    for kind in (WireKind.NEMO_RL, WireKind.SKYRL):
        payloads = [*encode(none, kind), *encode(trailing, kind)]
        both = decode(payloads, model=facts, token_ids=[[0, 1, 2, 3]] * 2)
        assert both.valid_N.tolist() == [False] * 4 + [True, True, False, False]
