"""The forced selection, on its own."""

import pytest
import torch

from foreroute.errors import ReplayError
from foreroute.replay import forced_selection


def own(scores):
    return torch.topk(scores, 2, dim=-1).indices


def test_values_come_from_dense_scores_and_carry_gradient():
    dense = torch.tensor([[0.1, 0.2, 0.3, 0.4]], requires_grad=True)
    masked = dense.masked_fill(torch.tensor([[True, True, False, False]]), 0.0)
    values, ids = forced_selection(masked, dense, torch.tensor([[0, 3]], dtype=torch.uint8), None, own)
    assert values.tolist() == [[pytest.approx(0.1), pytest.approx(0.4)]]
    assert ids.tolist() == [[0, 3]]
    assert ids.dtype == torch.int64
    values.sum().backward()
    assert dense.grad.tolist() == [[1, 0, 0, 1]]


def test_unrouted_rows_keep_the_routers_own_choice():
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.9, 0.0, 0.8, 0.1]])
    forced = torch.tensor([[0, 1], [3, 3]], dtype=torch.uint8)
    values, ids = forced_selection(scores, scores, forced, torch.tensor([1]), own)
    assert ids.tolist() == [[0, 1], [0, 2]]
    assert torch.equal(values, scores.gather(1, ids))


def test_another_number_of_rows_is_refused():
    scores = torch.zeros(3, 4)
    with pytest.raises(ReplayError, match=r"\(3,\).*\(2,\)"):
        forced_selection(scores, scores, torch.zeros(2, 2, dtype=torch.uint8), None, own)
