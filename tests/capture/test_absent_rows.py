"""Rows without a route: told by `valid` where routes come alone, zeros at the end in verl's batch, never all."""

import numpy as np
import pytest

from foreroute.capture import decode
from foreroute.errors import CaptureError
from tests import wires

R = wires.rollout(np.random.default_rng(9))


def verl(absent):
    batch = wires.verl([R])
    batch["routed_experts"][0, absent] = 0
    return batch


def valid_but(absent, count=11):
    valid = np.ones(count, bool)
    valid[absent] = False
    return valid


@pytest.mark.parametrize("absent", [[0], [4], [0, 1, 2, 3, 4], [3, 5, 10], list(range(10))])
def test_rows_of_zeros_before_a_routed_row_are_refused(absent):
    first = absent[0]
    with pytest.raises(CaptureError, match=rf"no route at position {first}, and one at position \d+.*only at the end"):
        decode(verl(absent), model=R.spec)


def test_a_sequence_that_fills_a_verl_batch_up_is_absent_as_a_whole():
    batch = wires.verl([R, R])
    batch["routed_experts"][1] = 0
    trace = decode(batch, model=R.spec)
    assert trace.select([0]).valid_N.sum() == 11
    assert not trace.select([1]).valid_N.any()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
@pytest.mark.parametrize("absent", [[0], [4, 5], [10], list(range(10))])
def test_valid_says_of_routes_alone_which_rows_are_absent_anywhere(absent, dtype):
    rows = R.routes_RLK.astype(dtype)
    rows[absent] = 99  # not looked at
    for given in (valid_but(absent), [valid_but(absent)], valid_but(absent)[None], valid_but(absent).tolist()):
        trace = decode(rows, model=R.spec, token_ids=R.tokens, valid=given)
        assert np.flatnonzero(~trace.valid_N).tolist() == [*absent, 11]
        kept = np.flatnonzero(trace.valid_N)
        assert np.array_equal(trace.expert_ids_NLK[kept], R.routes_RLK[kept])
        assert not trace.expert_ids_NLK[~trace.valid_N].any()


@pytest.mark.parametrize("absent", [[0], [4, 5], [10], list(range(10))])
def test_a_row_of_minus_one_is_absent_whatever_the_form(absent):
    rows, batch = R.routes_RLK.astype(np.int64), wires.verl([R])
    rows[absent] = batch["routed_experts"][0, absent] = -1
    for output in (rows, rows.tolist(), batch):
        trace = decode(output, model=R.spec, token_ids=[R.tokens])
        assert np.flatnonzero(~trace.valid_N).tolist() == [*absent, 11]
        assert np.array_equal(trace.expert_ids_NLK[trace.valid_N], np.delete(R.routes_RLK, absent, axis=0))


@pytest.mark.parametrize("dense", [0, -1])
def test_dense_layers_hold_anything_in_a_row_that_was_not_recorded(dense):
    rows = R.all_layers().astype(np.int64)
    rows[3], rows[3, 0] = -1, dense
    assert np.flatnonzero(~decode(rows, model=R.spec, token_ids=R.tokens).valid_N).tolist() == [3, 11]


def test_a_batch_may_have_minus_one_for_the_last_token_and_over_padding():
    batch, zeros = wires.verl([R, R]), wires.verl([R, R])
    routes = batch["routed_experts"].astype(np.int64)
    routes[(routes == 0).all(axis=(2, 3))] = -1
    batch["routed_experts"] = routes
    assert decode(batch, model=R.spec).equals(decode(zeros, model=R.spec))


def test_one_token_needs_no_row():
    assert decode(np.zeros((0, 4, 3), int), model=R.spec, token_ids=[[1]]).num_rows == 1
