"""An expert-parallel model small enough to be wrong in no way of its own: every rank knows every row of every cell.

Expert e of a cell gets the same rows on all ranks. Its home and its replicas each take a share of them, and the loss is
the sum over all of them, so that under any placement loss and home gradients are those of one process that has it all.
"""

from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.plan.schedule import ExecutionSchedule
from foreroute.testing.ranks import kept
from tests.ep.transfer.plans import no_tokens

DTYPE = torch.float64
WITHIN = 1e-12
"""A loss adds 3,500 numbers at most, each rounded by 1.1e-16, in any order: 4e-13. What goes astray shows at 1e-2."""
SHAPES = {"down_proj": (3, 4), "gate_up_proj": (4, 3), "gate_up_proj_bias": (4,)}
ROWS = 12


def peers(timeout_s=20.0, kind=PeerGroup):
    """One group per call, kind and timeout: making one is a collective call."""
    key = timeout_s, kind
    if key not in kept:
        kept[key] = kind(timeout_s=timeout_s)
    return kept[key]


def consensus(timeout_s=20.0):
    """As `peers`."""
    return peers(timeout_s, RankConsensus)


def weight(name, layer, expert, dtype=DTYPE):
    """A tensor that says which expert it is."""
    generator = torch.Generator().manual_seed(1000 * layer + 10 * expert + len(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(dtype)


def shard(home_E, rank, layer, dtype=DTYPE):
    """Name -> [E / G, ...], the experts that live on the rank."""
    mine = np.flatnonzero(home_E == rank).tolist()
    return {name: torch.stack([weight(name, layer, e, dtype) for e in mine]) for name in SHAPES}


def shards(plan, rank):
    """Per layer, trainable."""
    layers = [shard(plan.home_LE[layer], rank, layer) for layer in range(plan.shape[1])]
    return [{name: torch.nn.Parameter(tensor) for name, tensor in home.items()} for home in layers]


def hosted(cell, rank):
    """Experts that the rank hosts beside its own, by slot."""
    return [int(cell.expert_R[r]) for r in np.argsort(cell.slot_R) if cell.rank_R[r] == rank]


def rows_of(cell, expert):
    """[ROWS, 3], what the expert gets in this cell, all of it."""
    generator = torch.Generator().manual_seed(10_000 * cell.micro_step + 100 * cell.layer + expert)
    return torch.randn(ROWS, 3, generator=generator, dtype=DTYPE)


def apply(rows, weights, i):
    hidden = torch.tanh(rows @ weights["gate_up_proj"][i].T + weights["gate_up_proj_bias"][i])
    return hidden @ weights["down_proj"][i].T


def reference(plan):
    """The loss of one process that has all experts, and per layer and expert its weights, with their gradients."""
    num_micro_steps, num_layers, num_experts = plan.shape
    experts = [
        [{n: weight(n, i, e).requires_grad_() for n in SHAPES} for e in range(num_experts)] for i in range(num_layers)
    ]
    total = torch.zeros((), dtype=DTYPE)
    for micro_step in range(num_micro_steps):
        for layer in range(num_layers):
            for expert, weights in enumerate(experts[layer]):
                rows = rows_of(Cell(0, micro_step, layer), expert)
                total = total + apply(rows, {n: w[None] for n, w in weights.items()}, 0).square().sum()
    total.backward()
    return total.item(), experts


class Multiplied:
    """Gradients that arrive multiplied."""

    def __init__(self, returning, factor):
        self.returning, self.factor = returning, factor

    def wait(self):
        return {
            name: {row: grad * self.factor for row, grad in of_rows.items()}
            for name, of_rows in self.returning.wait().items()
        }


def fetched(engine, cell):
    """The weights of the replicas here."""
    engine.fetch(cell)
    return engine.wait_weights(cell)


class _Replicas(torch.autograd.Function):
    """Keeps no weights: backward fetches them again, as the layer of `foreroute.ep` does."""

    @staticmethod
    def forward(ctx, engine, cell, home, part_of, *shards):
        ctx.engine, ctx.cell, ctx.home, ctx.part_of = engine, cell, home, part_of
        return part_of(fetched(engine, cell))

    @staticmethod
    def backward(ctx, grad):
        found = fetched(ctx.engine, ctx.cell)
        names = sorted(found)
        with torch.enable_grad():
            weights = {name: found[name].detach().requires_grad_() for name in names}
            part = ctx.part_of(weights)
        grads = torch.autograd.grad(part, [weights[name] for name in names], grad)
        returned = ctx.engine.return_grads(ctx.cell, dict(zip(names, grads, strict=True))).wait()
        return None, None, None, None, *(laid_out(returned[name], ctx.home[name]) for name in names)


def laid_out(returned, shard):
    """What came home, as a gradient of the whole shard."""
    grad = torch.zeros_like(shard)
    for row, gradient in returned.items():
        grad[row] = gradient
    return grad


def layer_loss(engine, plan, cell, home, rank):
    """This rank's part of the loss of a cell."""
    plan_cell = plan.cell(cell.micro_step, cell.layer)
    hosts = {e: [int(plan_cell.home_E[e])] for e in range(len(plan_cell.home_E))}
    for e, r in zip(plan_cell.expert_R.tolist(), plan_cell.rank_R.tolist(), strict=True):
        hosts[e].append(r)
    here = [(home, i, int(e)) for i, e in enumerate(np.flatnonzero(plan_cell.home_E == rank))]
    total = sum(_share(cell, hosts, e, rank, weights, i) for weights, i, e in here)
    part_of = partial(_replica_part, cell, hosts, hosted(plan_cell, rank), rank)
    return total + _Replicas.apply(engine, cell, home, part_of, *(home[name] for name in sorted(home)))


def _replica_part(cell, hosts, experts, rank, replicas):
    # the empty sum keeps the graph the same on ranks that serve nothing
    part = sum(tensor.sum() for tensor in replicas.values()) * 0.0
    for i, expert in enumerate(experts):
        part = part + _share(cell, hosts, expert, rank, replicas, i)
    return part


def _share(cell, hosts, expert, rank, weights, i):
    rows = rows_of(cell, expert)
    nth = sorted(hosts[expert]).index(rank)
    return apply(rows[nth :: len(hosts[expert])], weights, i).square().sum()


def begin(weights, step, plan, *, updating=True):
    """Activate a plan of which nothing but its weights is executed."""
    rank = min(weights._peers.rank, plan.topology.num_ranks - 1)  # a plan for other ranks is refused later
    schedule = ExecutionSchedule(plan, no_tokens(plan), rank, paths=weights.paths)
    weights.begin_step(step, plan, schedule)
    weights.expect_backward(updating)


def run_step(engine, plan, homes, rank, *, step=0, updating=True):
    """All micro-steps of a step, forward and backward; the loss of each rank and the gradients stay in `homes`."""
    begin(engine, step, plan, updating=updating)
    total = 0.0
    for micro_step in range(plan.shape[0]):
        cells = [Cell(step, micro_step, layer) for layer in range(plan.shape[1])]
        with torch.set_grad_enabled(updating):
            losses = [layer_loss(engine, plan, c, homes[c.layer], rank) for c in cells]
        total += sum(loss.item() for loss in losses)
        if updating:
            # from the last layer to the first, as a model would
            for loss in reversed(losses):
                loss.backward()
    return total


def summed(value):
    """Over all ranks."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def largest_difference(plan, homes, rank):
    """Of this rank's gradients from those of `reference`, relative to the largest element of each."""
    _, per_expert = reference(plan)
    worst = 0.0
    for layer, home in enumerate(homes):
        for i, e in enumerate(np.flatnonzero(plan.home_LE[layer] == rank).tolist()):
            for name in SHAPES:
                wanted = per_expert[layer][e][name].grad
                worst = max(worst, ((home[name].grad[i] - wanted).abs().max() / wanted.abs().max()).item())
    return worst


def make_engine(plan, rank, options=None, *, kind=PeerGroup, homes=None):
    """An engine with its trainable shards."""
    homes = shards(plan, rank) if homes is None else homes
    return TransferEngine(
        dict(enumerate(homes)), options or TransferOptions(paths="host"), peers(kind=kind), consensus()
    ), homes
