"""The direct path: what arrives is what the home rank has, and what returns is the sum of what was sent."""

from contextlib import closing

import numpy as np
import torch

from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.engine import TransferOptions
from tests.ep.transfer.plans import random_plan
from tests.ep.transfer.toy import SHAPES, begin, fetched, hosted, make_engine, shard, weight
from tests.tiers import grid

DIRECT = TransferOptions(paths="direct", prefetch=0)


def fetch_and_return(rank, plan, dtype, spoil):
    homes = [shard(plan.home_LE[layer], rank, layer, dtype) for layer in range(plan.shape[1])]
    weights, _ = make_engine(plan, rank, DIRECT, homes=homes)
    with closing(weights):
        begin(weights, 7, plan, updating=True)
        for micro_step, layer in np.ndindex(*plan.shape[:2]):
            _check_cell(weights, plan, Cell(7, micro_step, layer), rank, homes[layer], spoil)


def _check_cell(weights, plan, cell, rank, home, spoil):
    plan_cell, dtype = plan.cell(cell.micro_step, cell.layer), home["down_proj"].dtype
    here = hosted(plan_cell, rank)
    for _ in range(2):
        replicas = fetched(weights, cell)
        for name in SHAPES:
            wanted = [weight(name, cell.layer, e, dtype) for e in here]
            assert replicas[name].shape == (len(here), *SHAPES[name])
            assert all(torch.equal(a, b) for a, b in zip(replicas[name], wanted, strict=True))
    returned = weights.return_grads(cell, {name: (rank + 1 + spoil) * replicas[name] for name in SHAPES}).wait()
    mine = np.flatnonzero(plan_cell.home_E == rank).tolist()
    for name in SHAPES:
        wide = torch.promote_types(dtype, torch.float32)
        sent = [row for row, expert in enumerate(mine) if expert in plan_cell.expert_R]
        assert list(returned[name]) == sent
        for row in sent:
            expert = mine[row]
            total = torch.zeros(SHAPES[name], dtype=wide)
            for other in sorted(plan_cell.rank_R[plan_cell.expert_R == expert].tolist()):
                total += ((other + 1) * weight(name, cell.layer, expert, dtype)).to(wide)
            assert returned[name][row].dtype == wide
            assert torch.equal(returned[name][row], total)


@grid("ranks", [2, 4], quick=1)
@grid("dtype", [torch.float32, torch.bfloat16, torch.float64], quick=2)
def test_weights_come_and_gradients_return(workers, ranks, dtype):
    for seed in range(3):
        workers(ranks).run(fetch_and_return, random_plan(seed, ranks=ranks, slots=3), dtype, 0)


def test_the_comparison_sees_a_wrong_gradient(workers):
    outcomes = workers(2).outcomes(fetch_and_return, random_plan(1, ranks=2, slots=3), torch.float32, 1)
    assert {outcome.kind for outcome in outcomes} == {"AssertionError"}


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
