"""The forced selection, on its own."""

import pytest
import torch

from foreroute.errors import ReplayError
from foreroute.replay import ReplayRows, forced_selection


def own(scores):
    return torch.topk(scores, 2, dim=-1).indices


def rows(ids, routed=None):
    """One layer."""
    ids_LRK = torch.tensor([ids], dtype=torch.uint8)
    routed_R = torch.ones(len(ids), dtype=torch.bool) if routed is None else torch.tensor(routed)
    unrouted_Q = None if routed_R.all() else (~routed_R).nonzero()[:, 0]
    return ReplayRows(ids_LRK, routed_R, unrouted_Q, routed_R, routed_R)


def test_values_come_from_dense_scores_and_carry_gradient():
    dense = torch.tensor([[0.1, 0.2, 0.3, 0.4]], requires_grad=True)
    masked = dense.masked_fill(torch.tensor([[True, True, False, False]]), 0.0)
    values, ids, own_ids = forced_selection(masked, dense, rows([[0, 3]]), own)
    assert values.tolist() == [[pytest.approx(0.1), pytest.approx(0.4)]]
    assert ids.tolist() == [[0, 3]]
    assert ids.dtype == torch.int64
    assert own_ids is None
    values.sum().backward()
    assert dense.grad.tolist() == [[1, 0, 0, 1]]


@pytest.mark.parametrize("ask_all", [False, True])
def test_unrouted_rows_keep_the_routers_own_choice(ask_all):
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.9, 0.0, 0.8, 0.1]])
    given = rows([[0, 1], [3, 3]], [True, False])
    values, ids, own_ids = forced_selection(scores, scores, given, own, ask_all=ask_all)
    assert ids.tolist() == [[0, 1], [0, 2]]
    assert torch.equal(values, scores.gather(1, ids))
    assert (None if own_ids is None else own_ids.tolist()) == ([[3, 2], [0, 2]] if ask_all else None)


@pytest.mark.parametrize("ask_all", [False, True])
def test_with_one_pick_no_id_is_special(ask_all):
    """Expert 0 in a row with a route is forced; whatever stands in a row without one is not."""
    scores = torch.tensor([[0.1, 0.9], [0.1, 0.9], [0.9, 0.1]])
    given = rows([[0], [0], [1]], [True, False, False])
    _, ids, _ = forced_selection(scores, scores, given, lambda s: s.topk(1).indices, ask_all=ask_all)
    assert ids.tolist() == [[0], [1], [0]]


def test_another_number_of_rows_is_refused():
    scores = torch.zeros(3, 4)
    with pytest.raises(ReplayError, match=r"\(3,\).*\(2,\)"):
        forced_selection(scores, scores, rows([[0, 1], [0, 1]]), own)
