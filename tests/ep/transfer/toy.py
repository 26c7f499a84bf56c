"""A walk through the cells of a plan in the order of a pass: every replica that comes, and every sum that returns."""

from collections import Counter

import numpy as np
import torch

from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.plan.schedule import ExecutionSchedule
from foreroute.testing.ranks import kept
from tests.ep.transfer.plans import asked, no_tokens

DTYPE = torch.float64
SHAPES = {"down_proj": (3, 4), "gate_up_proj": (4, 3), "gate_up_proj_bias": (4,)}


def walk(engine, plan, rank, *, step=0, updating=True, checkpointed=False, factor=1, dtype=DTYPE):
    """One pass over a step, in which cells that no replica serves are not asked for, as a model does not.

    Replicas have the bits of their homes. Each rank returns `factor * (rank + 1)` times what it was sent, and a home
    gets the sum of that for a factor of 1, bit for bit, in a type that is wide enough for sums.
    """
    begin(engine, step, plan, updating=updating)
    visits = Counter()
    for _, micro_step, layer in asked(*plan.shape[:2], updating=updating, checkpointed=checkpointed):
        cell, plan_cell = Cell(step, micro_step, layer), plan.cell(micro_step, layer)
        if not plan.num_replicas_ML[micro_step, layer]:
            continue
        replicas = fetched(engine, cell)
        for name, shape in SHAPES.items():
            wanted = [weight(name, layer, expert, dtype) for expert in hosted(plan_cell, rank)]
            assert replicas[name].shape == (len(wanted), *shape)
            assert all(map(torch.equal, replicas[name], wanted)), f"{name} of {cell}"
        visits[cell] += 1
        if visits[cell] == 2 + checkpointed:
            sent = {name: factor * (rank + 1) * replicas[name] for name in SHAPES}
            _require_sums(engine.return_grads(cell, sent).wait(), plan_cell, layer, rank, dtype)


def _require_sums(returned, plan_cell, layer, rank, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    mine = np.flatnonzero(plan_cell.home_E == rank).tolist()
    for name, shape in SHAPES.items():
        assert list(returned[name]) == [row for row, expert in enumerate(mine) if expert in plan_cell.expert_R]
        for row, found in returned[name].items():
            total = torch.zeros(shape, dtype=wide)
            for other in sorted(plan_cell.rank_R[plan_cell.expert_R == mine[row]].tolist()):
                total += ((other + 1) * weight(name, layer, mine[row], dtype)).to(wide)
            assert found.dtype == wide
            assert torch.equal(found, total), f"{name} of row {row}"


def peers(timeout_s=20.0, group_class=PeerGroup):
    """One group per call, class and timeout: making one is a collective call."""
    key = timeout_s, group_class
    if key not in kept:
        kept[key] = group_class(timeout_s=timeout_s)
    return kept[key]


def consensus(timeout_s=20.0):
    return peers(timeout_s, RankConsensus)


def weight(name, layer, expert, dtype=DTYPE):
    generator = torch.Generator().manual_seed(1000 * layer + 10 * expert + len(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(dtype)


def shards(plan, rank, dtype=DTYPE):
    """Per layer, name -> [E / G, ...], the experts that live on the rank."""
    mine = [np.flatnonzero(home_E == rank).tolist() for home_E in plan.home_LE]
    return [
        {name: torch.nn.Parameter(torch.stack([weight(name, layer, e, dtype) for e in experts])) for name in SHAPES}
        for layer, experts in enumerate(mine)
    ]


def hosted(cell, rank):
    """Experts that the rank hosts beside its own, by slot."""
    return [int(cell.expert_R[r]) for r in np.argsort(cell.slot_R) if cell.rank_R[r] == rank]


def fetched(engine, cell):
    engine.fetch(cell)
    return engine.wait_weights(cell)


def begin(weights, step, plan, *, updating=True):
    """Activate a plan of which nothing but its weights is executed."""
    rank = min(weights._peers.rank, plan.topology.num_ranks - 1)  # a plan for other ranks is refused later
    schedule = ExecutionSchedule(plan, no_tokens(plan), rank, paths=weights.options.paths)
    weights.begin_step(step, plan, schedule)
    weights.expects_backward = updating


def make_engine(plan, rank, options=None, *, homes=None):
    homes = shards(plan, rank) if homes is None else homes
    options = options or TransferOptions(paths="host")
    return TransferEngine(dict(enumerate(homes)), options, peers(), consensus())
