"""Training with moving homes equals training with fixed ones, bit for bit, optimizer state included."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from foreroute.ep.transfer.home_moves import MovingRanks, agree_on_homes, inspect_stacked, move_layers
from foreroute.ep.transfer.segments import shard_moves
from tests.ep.transfer.toy import SHAPES, consensus, peers, shard
from tests.tiers import grid

EXPERTS, LAYERS = 8, 2
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adam, one by one": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


def homes_of_steps(seed, ranks, steps):
    rng, home_LE = np.random.default_rng(seed), np.tile(np.arange(EXPERTS) % ranks, (LAYERS, 1))
    return [rng.permuted(home_LE, axis=1) for _ in range(steps)]


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


def loss_of(home_E, layer, home, rank, step):
    """Different for every expert and step."""
    total = torch.zeros(())
    for i, expert in enumerate(np.flatnonzero(home_E == rank).tolist()):
        generator = torch.Generator().manual_seed(10_000 * step + 100 * layer + expert)
        for name in sorted(SHAPES):
            total = total + (home[name][i] * torch.randn(SHAPES[name], generator=generator)).square().sum()
    return total


def train(rank, homes_S, optimizer, keeps_state=True):
    """Name, layer and expert -> parameters after as many steps as there are homes."""
    layers = [shard(homes_S[0][layer], rank, layer) for layer in range(LAYERS)]
    homes = [{name: torch.nn.Parameter(tensor) for name, tensor in home.items()} for home in layers]
    optimize = OPTIMIZERS[optimizer]([p for home in homes for p in home.values()])
    received = 0
    for step, home_LE in enumerate(homes_S):
        if step:
            received += move(homes_S[step - 1], home_LE, homes, optimize if keeps_state else None)
        sum(loss_of(home_LE[layer], layer, homes[layer], rank, step) for layer in range(LAYERS)).backward()
        optimize.step()
        optimize.zero_grad()
    last_LE = homes_S[-1]
    return received, {
        (name, layer, expert): homes[layer][name][i].detach().clone()
        for layer in range(LAYERS)
        for i, expert in enumerate(np.flatnonzero(last_LE[layer] == rank).tolist())
        for name in SHAPES
    }


def gathered(outcomes):
    return {key: tensor for _, part in outcomes for key, tensor in part.items()}


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[key], other[key]) for key in one)


@grid("ranks", [2, 4], quick=1, day=1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_with_moves_equals_training_without(workers, ranks, optimizer):
    moving = homes_of_steps(ranks, ranks, 4)
    outcomes = workers(ranks).run(train, moving, optimizer)
    fixed = workers(ranks).run(train, [moving[0]] * 4, optimizer)
    assert equal(gathered(outcomes), gathered(fixed))
    assert sum(received for received, _ in fixed) == 0
    changed = sum((before != after).sum() for before, after in pairwise(moving))
    tensors = {"adamw": 4, "adam, one by one": 3, "sgd": 2, "plain sgd": 1}[optimizer]
    row_bytes = 8 * sum(np.prod(shape) for shape in SHAPES.values())
    assert sum(received for received, _ in outcomes) == changed * row_bytes * tensors


@pytest.mark.slow
def test_the_comparison_sees_optimizer_state_that_stayed_behind(workers):
    moving = homes_of_steps(2, 2, 4)
    outcomes = workers(2).run(train, moving, "adamw", False)
    assert not equal(gathered(outcomes), gathered(workers(2).run(train, [moving[0]] * 4, "adamw")))


def refuse(rank, what):
    before_LE, after_LE = homes_of_steps(0, 2, 2)
    homes = [{n: torch.nn.Parameter(t) for n, t in shard(before_LE[layer], rank, layer).items()} for layer in range(2)]
    parameters = [p for home in homes for p in home.values()]
    optimizer = torch.optim.Adam(parameters if what != "strangers" else [torch.nn.Parameter(torch.zeros(2))])
    if what in ("gradient", "state on one rank") and (rank or what == "gradient"):
        loss_of(before_LE[0], 0, homes[0], rank, 0).backward()
    if what == "state on one rank":
        optimizer.step()
        optimizer.zero_grad()
    if what == "odd state" and rank:
        optimizer.state[parameters[0]]["scales"] = torch.zeros(17)
    if what == "rows of other lengths" and rank:
        after_LE = [[0, 1], [0]]
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
