"""The engine: what arrives has the bits of home, and what returns is the sum of what was sent, under any plan.

Every path, use of slots and order of passes.
"""

import gc
import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.errors import ConfigError
from tests.ep.transfer.plans import random_plan
from tests.ep.transfer.toy import begin, fetched, hosted, make_engine, shards, walk, weight
from tests.tiers import grid

DIRECT = TransferOptions(paths="direct", prefetch=0)


def passes(rank, plan, options, dtype=torch.float64, factor=1):
    """Records of a recompute and of updates."""
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


@grid(("ranks", "options", "dtype", "shape"), CASES, quick=3, day=4)
def test_replicas_are_what_is_at_home_and_gradients_return(workers, ranks, options, dtype, shape):
    for seed in range(2):
        workers(ranks).run(passes, random_plan(seed, ranks=ranks, **shape), options, dtype)


@pytest.mark.parametrize("factor", [0, 2])
def test_the_comparison_sees_gradients_lost_or_doubled_on_their_way_home(workers, factor):
    outcomes = workers(2).outcomes(passes, random_plan(0, ranks=2), DIRECT, torch.float64, factor)
    assert {outcome.kind for outcome in outcomes} == {"AssertionError"}


def test_all_but_the_first_fetch_had_begun_before_it_was_asked_for(workers):
    plan = random_plan(5, ranks=4, micro_steps=3, layers=4, sharing="shared")
    options = TransferOptions(paths="direct", prefetch=1)
    for outcome in workers(4).run(passes, plan, options):
        for stage in ("recompute", "update", "checkpointed"):
            moved = [r for r in outcome[stage] if r.kind == "fetch" and r.direct_bytes]
            assert [r for r in moved if not r.prefetched] == [r for r in moved[:1] if r.cell[1:] == (0, 0)], stage


def test_cells_without_replicas_are_passed_over(workers):
    """What is prefetched is the next cell that needs it, however far away."""
    plan = random_plan(2, ranks=2, layers=7, micro_steps=2, slots=1, sharing="shared")
    some = plan.num_replicas_ML.reshape(-1)
    assert 0 < (some > 0).sum() < len(some) - 3
    for found in workers(2).run(passes, plan, TransferOptions(paths="direct")):
        moved = [r for r in found["recompute"] + found["checkpointed"] if r.kind == "fetch" and r.direct_bytes]
        assert len(moved) > 2
        assert all(record.prefetched for record in moved if record.cell != moved[0].cell)


def steps_recorded(rank, plan):
    engine = make_engine(plan, rank)
    for step in range(2):
        walk(engine, plan, rank, step=step)
    engine.close()
    return {record.cell.step for record in engine.take_records()}


def test_records_that_nobody_takes_do_not_pile_up(workers):
    assert workers(2).run(steps_recorded, random_plan(0, ranks=2, slots=3)) == [{1}, {1}]


def fetch_after_a_failure(rank, plan):
    """The first transfer cannot begin on any rank."""
    engine = make_engine(plan, rank, DIRECT)
    begin(engine, 0, plan, updating=False)
    cell = next(Cell(0, m, n) for m, n in np.argwhere(plan.num_replicas_ML).tolist())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeerGroup, "post", Mock(side_effect=MemoryError("no memory for messages")))
        with pytest.raises(MemoryError, match=r"memory.*messages"):
            engine.fetch(cell)
    found = fetched(engine, cell)
    experts = hosted(plan.cell(cell.micro_step, cell.layer), rank)
    engine.close()
    return [(found[name][i] == weight(name, cell.layer, e)).all() for name in found for i, e in enumerate(experts)]


def test_replicas_whose_transfer_could_not_begin_are_not_taken_for_there(workers):
    outcomes = workers(2).run(fetch_after_a_failure, random_plan(3, ranks=2, sharing="layer"))
    assert any(outcomes)
    assert all(all(outcome) for outcome in outcomes)


@pytest.mark.parametrize(
    ("options", "message"), [({"paths": "both"}, "paths is 'both'"), ({"prefetch": -1}, "prefetch is -1")]
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        TransferOptions(**options)


def transfer_threads():
    return {thread for thread in threading.enumerate() if thread.name == "transfers"}


def threads_of_a_run(rank, plan, options, closes):
    """How many are new after each step, whether they are the same, and how many when the engine is gone."""
    before = transfer_threads()
    engine, seen = make_engine(plan, rank, options), []
    for step in range(3):
        walk(engine, plan, rank, step=step)
        seen.append(transfer_threads() - before)
    if closes:
        engine.close()
    del engine
    gc.collect()
    for thread in seen[0]:
        thread.join(20)
    return [len(each) for each in seen], seen[0] == seen[1] == seen[2], len(transfer_threads() - before)


@grid("closes", [True, False], quick=1, ids=["closed", "dropped"])
def test_an_engine_has_one_thread_for_its_life(workers, closes):
    for options in (TransferOptions(paths="direct", prefetch=2), TransferOptions(paths="host")):
        found = workers(2).run(threads_of_a_run, random_plan(0, ranks=2, slots=3), options, closes)
        assert found == [([1, 1, 1], True, 0)] * 2
