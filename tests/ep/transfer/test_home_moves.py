"""Moves of stacked experts that are refused on all ranks alike. `tests/ep/test_homes.py` has what moves."""

import numpy as np
import pytest
import torch

from foreroute.ep.transfer.home_moves import MovingRanks, agree_on_homes, inspect_stacked, move_layers
from foreroute.ep.transfer.segments import shard_moves
from tests.ep.transfer.toy import consensus, peers, shard

EXPERTS, LAYERS = 8, 2


def move(before_LE, given_LE, homes, optimizer):
    """As a framework moves stacked experts."""
    after_LE = agree_on_homes(consensus(), before_LE, given_LE, peers().size)
    changed = np.flatnonzero((before_LE != after_LE).any(axis=1))
    return move_layers(
        consensus(),
        MovingRanks(peers(), np.arange(peers().size)[:, None]),
        [shard_moves(before_LE[layer], after_LE[layer]) for layer in changed],
        lambda: [inspect_stacked(f"routed layer {layer}", homes[layer], optimizer) for layer in changed],
    )


def refuse(rank, what):
    before_LE = np.tile(np.arange(EXPERTS) % 2, (LAYERS, 1))
    after_LE = [[0, 1], [0]] if what == "rows of other lengths" and rank else before_LE[:, ::-1]
    homes = [
        {n: torch.nn.Parameter(t) for n, t in shard(before_LE[layer], rank, layer).items()} for layer in range(LAYERS)
    ]
    parameters = [p for home in homes for p in home.values()]
    optimizer = torch.optim.Adam(parameters if what != "strangers" else [torch.nn.Parameter(torch.zeros(2))])
    if what == "gradient" or (what == "state on one rank" and rank):
        sum(p.square().sum() for p in homes[0].values()).backward()
    if what == "state on one rank":
        optimizer.step()
        optimizer.zero_grad()
    if what == "odd state" and rank:
        optimizer.state[parameters[0]]["scales"] = torch.zeros(17)
    kept = [p.detach().clone() for p in parameters]
    try:
        move(before_LE, after_LE, homes, optimizer)
    finally:
        assert all(torch.equal(a, b) for a, b in zip(kept, parameters, strict=True))


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("rows of other lengths", "PlanError", "rank 1: "),
        ("gradient", "TransferError", "rank 0: down_proj of routed layer 0 has a gradient; call zero_grad"),
        ("strangers", "TransferError", "down_proj of routed layer 0 is no parameter of the optimizer"),
        ("odd state", "TransferError", "rank 1: down_proj, scales of routed layer 0 has shape (17,), expected 4 rows"),
        ("state on one rank", "TransferError", "Step the optimizer on all ranks or on none"),
    ],
)
def test_what_cannot_be_moved_is_refused_on_all_ranks_and_nothing_moves(workers, what, kind, message):
    outcomes = workers(2).outcomes(refuse, what)
    assert {outcome.kind for outcome in outcomes} == {kind}
    assert len({outcome.message for outcome in outcomes}) == 1
    assert message in outcomes[0].message
