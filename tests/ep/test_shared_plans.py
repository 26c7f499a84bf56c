"""A plan that one rank makes, on all of them: executed as any other, and ended together where it cannot be made."""

import os
import signal

import torch

from foreroute import planner
from foreroute.adapters import hf
from foreroute.ep import BatchRows
from foreroute.ep.transfer.consensus import plan_digest
from foreroute.plan import PlanOptions, Topology
from foreroute.plan.plan_file import plan_to_bytes
from foreroute.testing.ranks import Workers
from tests.adapters.hf.model_runs import log_probs
from tests.ep.training import Case, batch, policy, routes
from tests.ep.training_worker import whole_gradients
from tests.ep.transfer.plans import LINKS, SLOTS

CASE = Case(ranks=2)
MICRO_STEPS = 3


def a_step(rank, is_shared):
    """The plan, losses and gradients of a step under a plan that every rank makes, or the first alone."""
    routed = hf.attach(policy(CASE))
    placed = hf.distribute(routed.model, timeout_s=20)
    traces = [routes(routed.spec, CASE, rank, 0, m) for m in range(MICRO_STEPS)]
    rows = [BatchRows.replayed(trace, *batch(rank, 0, m).values()) for m, trace in enumerate(traces)]
    counts_MLGE = placed.gather_counts([each.routed_LE for each in rows])
    made = []

    def make():
        made.append(planner.plan(counts_MLGE, Topology(2, 2, SLOTS, LINKS), PlanOptions(tolerance=0.0)))
        return made[0]

    plan = placed.share_plan(make) if is_shared else make()
    assert len(made) == (rank == 0 or not is_shared)
    placed.begin_step(0, plan, counts_MLGE, rows)
    losses = []
    for m, trace in enumerate(traces):
        with routed.replay(trace), placed.executing(m):
            loss = -log_probs(placed.model, batch(rank, 0, m)).sum()
            loss.backward()
        losses.append(loss.item())
    placed.sum_gradients()
    return plan_digest(plan), plan_to_bytes(plan), losses, whole_gradients(placed)


def test_the_plan_of_the_first_rank_is_that_of_all(workers):
    shared, own = workers(2).run(a_step, True), workers(2).run(a_step, False)
    for (*found, grads), (*expected, expected_grads) in zip(shared, own, strict=True):
        assert found == expected
        assert grads.keys() == expected_grads.keys()
        assert all(torch.equal(grads[name], expected_grads[name]) for name in grads)


def shared(rank, way):
    def make():
        assert rank == 0, "the first rank plans"
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no room to plan")

    hf.distribute(policy(CASE), timeout_s=20).share_plan(make)


def test_a_planner_that_fails_ends_all(workers):
    first, second = workers(2).outcomes(shared, "failing")
    assert (first.kind, first.message) == ("RuntimeError", "no room to plan")
    assert (second.kind, second.message) == ("PlanError", "rank 0 made no plan; look for the first error in its log")


def test_a_planning_rank_that_dies_ends_the_others():
    group = Workers(2, timeout_s=60)
    try:
        outcomes = group.outcomes(shared, "killed")
    finally:
        group.close()
    assert outcomes[0] is None
    assert outcomes[1].kind == "TransferError", outcomes[1].trace
    assert "A process died" in outcomes[1].message
