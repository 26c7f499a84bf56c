"""The engine: what arrives has the bits of home, and what returns is the sum of what was sent, under any plan."""

from contextlib import closing

import pytest
import torch

from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.engine import TransferOptions
from tests.ep.transfer.plans import random_plan
from tests.ep.transfer.toy import begin, fetched, make_engine, shards, walk
from tests.tiers import grid

DIRECT = TransferOptions(paths="direct", prefetch=0)


def passes(rank, plan, options, dtype=torch.float64, factor=1):
    engine, found = make_engine(plan, rank, options, homes=shards(plan, rank, dtype)), {}
    for name in ("recompute", "update", "checkpointed"):
        how = {"updating": name != "recompute", "checkpointed": name == "checkpointed"}
        walk(engine, plan, rank, **how, factor=factor, dtype=dtype)
        found[name] = engine.take_records()
    engine.close()
    return found


NODES = {"keep": 0.6, "slots": 3, "per_node": 2}
CASES = [
    (2, TransferOptions(paths="direct"), torch.float64, {"sharing": "shared"}),
    (2, TransferOptions(paths="host"), torch.bfloat16, {"keep": 0.6, "sharing": "layer"}),
    (4, DIRECT, torch.float32, {"slots": 3}),
    (4, TransferOptions(paths="host", prefetch=2), torch.float32, {"sharing": "shared"}),
    (4, TransferOptions(paths="host", prefetch=3), torch.float64, NODES | {"sharing": "layer"}),
    (4, TransferOptions(paths="host", prefetch=0), torch.bfloat16, {"layers": 1, "per_node": 2, "sharing": "shared"}),
]


@grid(("ranks", "options", "dtype", "shape"), CASES, quick=2, day=4)
def test_replicas_are_what_is_at_home_and_gradients_return(workers, ranks, options, dtype, shape):
    for seed in range(2):
        workers(ranks).run(passes, random_plan(seed, ranks=ranks, **shape), options, dtype)


@pytest.mark.parametrize("factor", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_comparison_sees_gradients_lost_or_doubled_on_their_way_home(workers, factor):
    outcomes = workers(2).outcomes(passes, random_plan(0, ranks=2), DIRECT, torch.float64, factor)
    assert {outcome.error for outcome in outcomes} == {"AssertionError"}


def test_all_but_the_first_fetch_had_begun_before_it_was_asked_for(workers):
    plan = random_plan(5, ranks=4, micro_steps=3, layers=4, sharing="shared")
    options = TransferOptions(paths="direct")
    assert options.prefetch == 1, "docs/train.md says so"
    for outcome in workers(4).run(passes, plan, options):
        for stage in ("recompute", "update", "checkpointed"):
            moved = [r for r in outcome[stage] if r.operation == "fetch" and r.direct_bytes]
            assert [r for r in moved if not r.prefetched] == [r for r in moved[:1] if r.cell[1:] == (0, 0)], stage


def kept_for_backward(rank, plan, options):
    """Autograd keeps the slots of every cell as they are handed out."""
    loss = torch.zeros(())
    with closing(make_engine(plan, rank, options)) as engine:
        begin(engine, 0, plan)
        for layer in range(plan.shape[1]):
            slots = fetched(engine, Cell(0, 0, layer))["down_proj"]
            loss = loss + (torch.ones_like(slots, requires_grad=True) * slots).sum()
        loss.backward()


@grid("paths", ["host", "direct"], quick=1)
def test_a_slot_refilled_before_its_backward_is_refused(workers, paths):
    """With one set of shared slots, every cell overwrites the one before; in neighbouring slots, which are views."""
    plans = (random_plan(seed, ranks=2, micro_steps=1, sharing="shared") for seed in range(1000))
    plan = next(plan for plan in plans if all(len(set(plan.cell(0, layer).rank_R)) == 2 for layer in range(3)))
    outcomes = workers(2).outcomes(kept_for_backward, plan, TransferOptions(prefetch=0, paths=paths))
    assert {outcome.error for outcome in outcomes} == {"RuntimeError"}
    assert all("modified by an inplace operation" in outcome.message for outcome in outcomes)
