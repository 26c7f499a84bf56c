"""What one router does in a pass, on its own."""

import pytest
import torch

from foreroute.core.errors import ReplayError
from foreroute.core.passes import Pass, RecordOptions, Rows

SCORES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.9, 0.0, 0.8, 0.1]])


def own():
    return SCORES.topk(2, dim=-1).indices


def opened(ids=None, *, top_k=2, options=None):
    """A pass of one router over two rows."""
    rows = None
    if ids is not None:
        rows = Rows(torch.tensor([ids], dtype=torch.int16))
    return Pass([("gate", top_k)], 2, torch.int16, torch.device("cpu"), rows, options or RecordOptions())


def test_rows_without_a_route_keep_the_routers_own_choice():
    current = opened([[0, 1], [-1, -1]])
    ids, own_ids = current.parts()[0].choose(own())
    assert (ids.tolist(), own_ids.tolist()) == ([[0, 1], [0, 2]], [[3, 2], [0, 2]])
    assert ids.dtype == torch.int64
    assert current.native_LRK.tolist() == [[[3, 2], [0, 2]]]
    assert current.executed_LRK.tolist() == [[[0, 1], [0, 2]]]


def test_with_one_pick_no_id_is_special():
    """Expert 0 is forced like any other."""
    ids, _ = opened([[0], [-1]], top_k=1).parts()[0].choose(SCORES.topk(1).indices)
    assert ids.tolist() == [[0], [0]]


@pytest.mark.parametrize("ids", [None, [[0, 1], [-1, -1]]])
def test_a_recomputation_runs_what_the_forward_ran(ids):
    """Whatever the router would pick by now."""
    current = opened(ids)
    ran, _ = current.parts()[0].choose(own())
    again, _ = current.parts(is_recompute=True)[0].choose(None)
    assert torch.equal(again, ran)


def test_a_router_that_sees_other_rows_is_refused():
    with pytest.raises(ReplayError, match="router gate selects 2 experts in 3 of the 2 rows"):
        opened([[0, 1], [2, 3]]).parts()[0].choose(torch.zeros(3, 2, dtype=torch.int64))


def test_routes_for_other_rows_than_the_pass_has_are_refused():
    with pytest.raises(ReplayError, match=r"the routes are \[1, 3, 2\] \[L, R, K\], the routers select \[1, 2, 2\]"):
        opened([[0, 1], [2, 3], [4, 5]])


def test_scores_are_kept_of_what_the_router_picks_by_itself():
    current = opened([[0, 1], [2, 3]], options=RecordOptions(scores=True))
    now = current.parts()[0]
    _, own_ids = now.choose(own())
    now.keep_scores(SCORES, own_ids, by_probability=False)
    assert current.scores.picked[0].tolist() == [pytest.approx([0.4, 0.3]), pytest.approx([0.9, 0.8])]
    assert current.scores.margin()[0].tolist() == pytest.approx([0.1, 0.7])
    assert not current.scores.by_probability.any()


def test_a_router_with_fewer_picks_than_others_uses_the_first_columns():
    rows = Rows(torch.tensor([[[0, 1]], [[3, -1]]], dtype=torch.int16))
    current = Pass([("a", 2), ("b", 1)], 1, torch.int16, torch.device("cpu"), rows, RecordOptions())
    ids = [now.choose(SCORES[:1].topk(k).indices)[0].tolist() for now, k in zip(current.parts(), (2, 1), strict=True)]
    assert ids == [[[0, 1]], [[3]]]
    assert current.native_LRK.tolist() == [[[3, 2]], [[3, -1]]]
