"""The engine: what arrives has the bits of home, and what returns is the sum of what was sent, under any plan.

Every path, use of slots and order of passes.
"""

import gc
import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from foreroute.ep.transfer.cells import Cell, next_cell
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.errors import ConfigError
from tests.ep.transfer.plans import asked, least_fetches_L, random_plan
from tests.ep.transfer.toy import begin, fetched, hosted, make_engine, shards, walk, weight
from tests.tiers import grid

DIRECT = TransferOptions(paths="direct", prefetch=0)


def passes(rank, plan, options, dtype=torch.float64, factor=1):
    """Records of a recompute and of an update, and the bytes of an expert."""
    homes = shards(plan, rank, dtype)
    engine, _ = make_engine(plan, rank, options, homes=homes)
    found = {"row": sum(tensor[0].nbytes for tensor in homes[0].values())}
    for name in ("recompute", "update", "checkpointed"):
        walk(
            engine,
            plan,
            rank,
            updating=name != "recompute",
            checkpointed=name == "checkpointed",
            factor=factor,
            dtype=dtype,
        )
        found[name] = engine.take_records()
    engine.close()
    return found


CASES = [
    (2, TransferOptions(paths="direct"), torch.float64, {"sharing": "shared"}),
    (2, TransferOptions(paths="host"), torch.bfloat16, {"keep": 0.6, "sharing": "layer"}),
    (4, DIRECT, torch.float32, {"slots": 3}),
    (4, TransferOptions(paths="host", prefetch=2), torch.float32, {"per_node": 2, "sharing": "shared"}),
    (4, TransferOptions(paths="host", prefetch=3), torch.float64, {"keep": 0.6, "slots": 3, "sharing": "layer"}),
    (
        4,
        TransferOptions(paths="host", prefetch=0),
        torch.bfloat16,
        {"layers": 1, "micro_steps": 3, "per_node": 2, "sharing": "shared"},
    ),
]


@grid(("ranks", "options", "dtype", "shape"), CASES, quick=3, day=4)
def test_replicas_are_what_is_at_home_and_gradients_return(workers, ranks, options, dtype, shape):
    for seed in range(2):
        workers(ranks).run(passes, random_plan(seed, ranks=ranks, **shape), options, dtype)


@pytest.mark.parametrize("factor", [0, 2])
def test_the_comparison_sees_gradients_lost_or_doubled_on_their_way_home(workers, factor):
    outcomes = workers(2).outcomes(passes, random_plan(0, ranks=2), DIRECT, torch.float64, factor)
    assert {outcome.kind for outcome in outcomes} == {"AssertionError"}


@grid("paths", ["host", "direct"], quick=1)
def test_one_pass_moves_the_fewest_bytes_that_the_plan_needs(workers, paths):
    plan = random_plan(3, ranks=4, micro_steps=4, slots=3, keep=0.5, sharing="layer")
    outcomes = workers(4).run(passes, plan, TransferOptions(paths=paths))
    host, direct = (
        sum(getattr(record, f"{path}_bytes") for outcome in outcomes for record in outcome["recompute"])
        for path in ("host", "direct")
    )
    assert {"host": direct, "direct": host}[paths] == 0
    assert host + direct == least_fetches_L(plan).sum() * outcomes[0]["row"]
    assert plan.num_replicas_ML.sum() > least_fetches_L(plan).sum() > 0


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
    engine, _ = make_engine(plan, rank)
    for step in range(2):
        walk(engine, plan, rank, step=step)
    engine.close()
    return {record.cell.step for record in engine.take_records()}


def test_records_that_nobody_takes_do_not_pile_up(workers):
    assert workers(2).run(steps_recorded, random_plan(0, ranks=2, slots=3)) == [{1}, {1}]


def fetch_after_a_failure(rank, plan):
    """The first transfer cannot begin on any rank."""
    engine, _ = make_engine(plan, rank, TransferOptions(paths="direct", prefetch=0))
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


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize(("updating", "checkpointed"), [(False, False), (True, False), (True, True)])
def test_the_next_cell_is_guessed_right(num_layers, updating, checkpointed):
    """Against the order in which passes really ask for cells."""
    order = list(asked(3, num_layers, updating=updating, checkpointed=checkpointed))
    # the same cell again needs no transfer, so what counts is the next other one
    other = [cell for i, cell in enumerate(order) if i == 0 or cell != order[i - 1]]
    guesses = []
    for i, cell in enumerate(other):
        before = other[i - 1] if i else None
        guesses.append(next_cell(before, cell, range(num_layers), (3, num_layers), updating=updating))
    assert guesses == [*other[1:], None]


def transfer_threads():
    return {thread for thread in threading.enumerate() if thread.name == "transfers"}


def threads_of_a_run(rank, plan, options, closes):
    """How many are new after each step, whether they are the same, and how many when the engine is gone."""
    before = transfer_threads()
    engine, _ = make_engine(plan, rank, options)
    seen = []
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


def wrong_calls(rank, plan, other):
    weights, _ = make_engine(plan, rank, DIRECT)
    errors = []
    for call in (
        lambda: weights.fetch(Cell(0, 0, 0)),
        lambda: begin(weights, 0, other, updating=True),
        lambda: (begin(weights, 1, plan, updating=True), weights.fetch(Cell(2, 0, 0))),
    ):
        try:
            call()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    weights.close()
    return errors


def test_a_plan_out_of_step_or_for_other_ranks_is_refused(workers):
    for errors in workers(2).run(wrong_calls, random_plan(0, ranks=2), random_plan(0, ranks=4)):
        assert "no plan of that step is active, none is" in errors[0]
        assert errors[1] == "PlanError: the plan is for 4 ranks, and 2 are here; plan again for this world size"
        assert "step 2, micro-step 0, routed layer 0 is asked for" in errors[2]
        assert "that of step 1 is" in errors[2]
