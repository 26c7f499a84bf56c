"""Rows without a route: told by `valid` where routes come alone, zeros at the end in verl's batch, never all.

The last token was sampled and never fed: what stands for it in a capture is no route, whoever made it up.
"""

import numpy as np
import pytest

import foreroute as fr
from foreroute.capture import decode
from foreroute.errors import CaptureError
from tests import wires

R = wires.rollout(np.random.default_rng(9))
KNOWN = fr.RoutingTrace.from_sequences(R.spec, [R.tokens], [R.routes_RLK])


@pytest.mark.parametrize("absent", [[0], [4], [3, 5, 10], list(range(10))])
def test_rows_of_zeros_before_a_routed_row_are_refused(absent):
    batch = wires.verl([R])
    batch["routed_experts"][0, absent] = 0
    with pytest.raises(CaptureError, match=rf"no route at position {absent[0]}, and one at position .*only at the end"):
        decode(batch, model=R.spec)


@pytest.mark.parametrize("absent", [[0], [4, 5], list(range(10))])
def test_a_row_of_minus_one_is_absent_whatever_the_form(absent):
    rows, batch = R.routes_RLK.astype(np.int64), wires.verl([R])
    rows[absent] = batch["routed_experts"][0, absent] = -1
    for output in (rows, rows.tolist(), batch):
        trace = decode(output, model=R.spec, token_ids=[R.tokens])
        assert np.flatnonzero(~trace.valid_N).tolist() == [*absent, 11]
        assert np.array_equal(trace.expert_ids_NLK[trace.valid_N], np.delete(R.routes_RLK, absent, axis=0))


MADE_UP = {
    "the first experts": np.tile(np.arange(3), (4, 1)),
    "the row before": R.routes_RLK[-1],
    "zeros": np.zeros((4, 3), int),
    "no ids": np.full((4, 3), 99),
    "-1 in part": np.full((4, 3), [-1, 2, 3]),
}


@pytest.mark.parametrize("row", MADE_UP.values(), ids=MADE_UP)
def test_a_row_for_the_last_token_is_no_route(row):
    """Nor when the caller says so."""
    rows = np.concatenate([R.routes_RLK, row[None]])
    for output in (rows, rows.tolist(), wires.npy(rows.astype("<i4")), [rows]):
        assert decode(output, model=R.spec, token_ids=[R.tokens]).equals(KNOWN)
    assert decode(rows, model=R.spec, token_ids=R.tokens, valid=np.ones(12, bool)).equals(KNOWN)
