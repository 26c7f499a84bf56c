"""A plan that one rank makes, on all of them: executed while it is made, and ended together where it cannot be made."""

import os
import signal
import threading
from contextlib import closing, contextmanager, nullcontext
from unittest import mock

import numpy as np
import pytest
import torch

from foreroute import planner
from foreroute.adapters import hf
from foreroute.ep import BatchRows
from foreroute.ep.shared_plan import SharedPlan
from foreroute.ep.transfer.consensus import plan_digest
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.plan import PlanOptions, Topology
from foreroute.planner.progress import PlanInProgress
from foreroute.testing.ranks import Raised, Workers
from tests.adapters.hf.model_runs import log_probs
from tests.ep.planned import SLOTS
from tests.ep.training import Case, batch, policy, routes
from tests.ep.training_worker import whole_gradients
from tests.ep.transfer.plans import LINKS

MICRO_STEPS = 4
WAIT_S = 30


class Gate:
    """Holds the planner up before it hands over anything but the first micro-step."""

    def __init__(self, error=None):
        self.opened, self.error, self.add = threading.Event(), error, PlanInProgress.add

    @contextmanager
    def around_the_planner(self):
        def held_up(progress, hosts, figures_ML2, begin, layer):
            if begin:
                assert self.opened.wait(WAIT_S), "nobody ran the first micro-step"
                if self.error is not None:
                    raise self.error
            self.add(progress, hosts, figures_ML2, begin, layer)

        with mock.patch.object(PlanInProgress, "add", held_up):
            yield


def a_step(rank, way, slots="layer"):
    """Losses, gradients and what was known when, of a step under a plan that is "whole" from the start or "shared"."""
    case = Case(ranks=2)
    routed = hf.attach(policy(case))
    placed = hf.distribute(routed.model, timeout_s=20)
    topology = Topology(2, 2, SLOTS, LINKS)
    traces = [routes(routed.spec, case, rank, 0, m) for m in range(MICRO_STEPS)]
    rows = [BatchRows.replayed(trace, *batch(rank, 0, m).values()) for m, trace in enumerate(traces)]
    counts_MLGE = placed.gather_counts([each.routed_LE for each in rows])
    gate = Gate(RuntimeError("no room to plan") if way == "failing" else None)
    held_up = nullcontext() if way == "whole" else gate.around_the_planner()
    with an_engine(placed, topology, slots), held_up:
        options = PlanOptions(tolerance=0.0, slots=slots)
        if way == "whole":
            plan = planner.plan(counts_MLGE, topology, options)
        else:
            progress = planner.start(counts_MLGE, topology, options) if rank == 0 else None
            plan = placed.share_plan(progress)
        planned = counts_MLGE.copy()
        if way == "other counts" and rank == 1:
            planned[-1, 0, 0] = np.roll(planned[-1, 0, 0], 1)
        placed.begin_step(0, plan, planned)
        losses, known = [], []
        for m, trace in enumerate(traces):
            with routed.replay(trace), placed.executing(m, rows[m]) as execution:
                loss = -log_probs(placed.model, batch(rank, 0, m)).sum()
                loss.backward()
            losses.append(loss.item())
            known.append(plan.num_known if isinstance(plan, SharedPlan) else MICRO_STEPS)
            assert execution.executed_L.sum() > 0
            gate.opened.set()
            if way == "killed" and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        placed.sum_gradients()
        parts = plan.parts if isinstance(plan, SharedPlan) else [plan]
        return losses, whole_gradients(placed), known, [plan_digest(part) for part in parts]


@contextmanager
def an_engine(placed, topology, slots):
    options = TransferOptions(slots=slots, timeout_s=20)
    with closing(TransferEngine(placed.homes, topology, options, PeerGroup(timeout_s=20))) as engine:
        placed.use(engine)
        engine.publish()
        yield


@pytest.mark.parametrize("slots", ["layer", "shared"])
def test_micro_steps_run_while_others_are_planned_and_nothing_changes(workers, slots):
    """The planner goes on only when rank 0 has run the first micro-step: whoever waits for all of the plan, ends."""
    shared = workers(2).run(a_step, "shared", slots)
    whole = workers(2).run(a_step, "whole", slots)
    assert shared[0][2] == shared[1][2], "ranks must know the same at every point"
    assert shared[0][2][0] == 1
    assert shared[0][2][-1] == MICRO_STEPS
    assert shared[0][3] == shared[1][3]
    for (losses, grads, *_), (expected, expected_grads, *_) in zip(shared, whole, strict=True):
        assert losses == expected
        assert grads.keys() == expected_grads.keys()
        assert all(torch.equal(grads[name], expected_grads[name]) for name in grads)


def could_not_begin(rank):
    placed = hf.distribute(policy(Case(ranks=2)), timeout_s=20)
    placed.share_plan(None)


def test_a_rank_that_could_not_plan_ends_all(workers):
    outcomes = workers(2).outcomes(could_not_begin)
    assert all(isinstance(outcome, Raised) for outcome in outcomes)
    assert {(o.kind, o.message) for o in outcomes} == {
        ("PlanError", "rank 0 made no plan; look for the first error in its log")
    }


def test_a_planner_that_fails_on_the_way_ends_all(workers):
    first, second = workers(2).outcomes(a_step, "failing")
    assert (first.kind, first.message) == ("RuntimeError", "no room to plan")
    assert (second.kind, second.message) == ("PlanError", "rank 0 made no plan; look for the first error in its log")


def test_counts_of_a_later_micro_step_are_compared_when_its_plan_is_there(workers):
    outcomes = workers(2).outcomes(a_step, "other counts")
    assert {outcome.kind for outcome in outcomes} == {"CountsError"}, outcomes[0].trace
    assert len({outcome.message for outcome in outcomes}) == 1
    assert outcomes[0].message.startswith("rank 1: counts have digest")
    assert "placed.executing(m" in outcomes[0].trace


def test_a_planning_rank_that_dies_on_the_way_ends_the_others():
    group = Workers(2, timeout_s=60)
    try:
        outcomes = group.outcomes(a_step, "killed")
    finally:
        group.close()
    assert outcomes[0] is None
    assert outcomes[1].kind == "TransferError", outcomes[1].trace
    assert "A process died" in outcomes[1].message
