"""Gradients of replicas are made, sent and added in float32, and rounded once: held against sums in float64."""

from types import SimpleNamespace

import pytest
import torch

from foreroute.ep.compute import StackedReplicas
from foreroute.ep.dispatch import RowGroups
from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.gradients import add_neighbours

ROWS, HIDDEN, REPLICAS = 96, 16, 3
HALF_UNIT = torch.finfo(torch.bfloat16).eps / 2


class Engine:
    """Two ranks in one: each has replicas of the experts whose home is here, and returns their gradients here."""

    def __init__(self, owned):
        self.owned, self.sent = owned, {}

    def fetch(self, cell):
        pass

    def wait_weights(self, cell):
        return {name: weight.detach() for name, weight in self.owned.items()}

    def return_grads(self, cell, grads):
        for name, grad in grads.items():
            self.sent.setdefault(name, []).append(grad)
        return SimpleNamespace(wait=dict)


def exact(shape, seed):
    """Numbers with 8 bits, whose products with a permutation are exact."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def permutations(seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.stack([torch.eye(HIDDEN)[torch.randperm(HIDDEN, generator=draw)] for _ in range(REPLICAS)]).bfloat16()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_gradient_in_bfloat16_is_that_of_float64_but_for_one_rounding(is_transposed):
    """Replicas of two ranks, and as many rows at home as one: permutations keep what is between exact.

    What home experts have found was rounded already, by the framework that they are computed by.
    """
    module = SimpleNamespace(
        has_gate=False, has_bias=True, is_transposed=is_transposed, act_fn=lambda rows: rows.view_as(rows)
    )
    home = {name: torch.nn.Parameter(permutations(seed)) for seed, name in enumerate(("up_proj", "down_proj"))}
    home |= {f"{name}_bias": torch.nn.Parameter(torch.zeros(REPLICAS, HIDDEN, dtype=torch.bfloat16)) for name in home}
    sizes, engine, oracle = [40, 0, 56], Engine(home), dict.fromkeys(home, 0.0)
    groups = RowGroups(sizes, torch.tensor(sizes).cumsum(0).to(torch.int32))
    for rank in range(2):
        rows, grads = exact((ROWS, HIDDEN), rank), exact((ROWS, HIDDEN), 10 + rank)
        replicas = StackedReplicas(Cell(0, 0, 0), engine, home)
        replicas.register()
        replicas.fetch()
        out = replicas.compute(rows[:0], module, rows.requires_grad_(), groups)
        out.backward(grads)
        for name, each in gradients_in_float64(home, rows, grads, sizes, is_transposed).items():
            oracle[name] = oracle[name] + each
    for at, (name, shard) in enumerate(home.items()):
        sent = engine.sent[name]
        assert [each.dtype for each in sent] == [torch.float32] * 2
        arrived = torch.stack(sent, dim=1).flatten(0, 1)  # those of a row behind each other
        returned = dict(enumerate(add_neighbours({name: arrived}, [2] * REPLICAS)[name]))
        own = exact(shard.shape, 20)
        given = [own.clone() if number == at else None for number in range(len(home))]
        found = replicas.add_returned({name: returned}, given)[at]
        expected = own.double() + oracle[name]
        # one rounding to 8 bits, and those of float32: of 200 terms near 1, at most 200 units of 2 ** -24 each
        bound = HALF_UNIT * expected.abs() * (1 + 2**-6) + 2e-4
        assert ((found.double() - expected).abs() <= bound).all(), name
        # and a control: what each rank had rounded
        rounded = own.double() + sum(each.bfloat16().double() for each in sent)
        assert ((rounded.bfloat16().double() - expected).abs() > bound).any(), name


def gradients_in_float64(home, rows, grads, sizes, is_transposed):
    """Of every parameter, [replicas, ...]."""
    weights = {name: each.detach().double() for name, each in home.items()}
    found = {name: [] for name in home}
    parts = zip(rows.detach().double().split(sizes), grads.double().split(sizes), strict=True)
    for replica, (x, g_down) in enumerate(parts):
        up, down = (
            weights[name][replica] if is_transposed else weights[name][replica].T for name in ("up_proj", "down_proj")
        )
        hidden, g_up = x @ up, g_down @ down.T
        for name, left, right in (("up_proj", x, g_up), ("down_proj", hidden, g_down)):
            grad = left.T @ right
            found[name].append(grad if is_transposed else grad.T)
            found[f"{name}_bias"].append(right.sum(0))
    return {name: torch.stack(each) for name, each in found.items()}
