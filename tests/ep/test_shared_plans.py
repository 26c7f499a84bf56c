"""A plan that one rank made, on all of them."""

import numpy as np

from foreroute.adapters import hf
from foreroute.ep.transfer.consensus import plan_digest
from tests.ep.planned import split_plan
from tests.ep.training import Case, policy
from tests.processes import Raised

COUNTS_MLGE = np.random.default_rng(0).integers(0, 9, (2, 3, 2, 8))


def shared(rank, has_one):
    placed = hf.distribute(policy(Case(ranks=2, plan=0)), timeout_s=20)
    mine = split_plan(3, COUNTS_MLGE, placed.home_LE) if has_one and rank == 0 else None
    plan = placed.share_plan(mine)
    placed.begin_step(0, plan, COUNTS_MLGE)
    return plan_digest(plan), plan.max_load_ML.tolist()


def test_all_ranks_get_the_plan_of_the_first(workers):
    first, second = workers(2).run(shared, True)
    assert first == second


def test_a_rank_that_could_not_plan_ends_all(workers):
    outcomes = workers(2).outcomes(shared, False)
    assert all(isinstance(outcome, Raised) for outcome in outcomes)
    assert {(o.kind, o.message) for o in outcomes} == {
        ("PlanError", "rank 0 made no plan; look for the first error in its log")
    }
