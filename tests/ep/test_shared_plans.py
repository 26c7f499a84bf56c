"""A plan that one rank makes cannot be made: all ranks end. One that is made is executed in `test_plan_files`."""

import os
import signal

from foreroute.adapters import hf
from foreroute.testing.models import tiny


def shared(rank, way):
    def make():
        assert rank == 0, "the first rank plans"
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no room to plan")

    hf.distribute(tiny("qwen3_moe"), timeout_s=20).share_plan(make)


def test_a_planner_that_fails_ends_all(workers):
    first, second = workers(2).outcomes(shared, "failing")
    assert (first.kind, first.message) == ("RuntimeError", "no room to plan")
    assert (second.kind, second.message) == ("PlanError", "rank 0 made no plan; look for the first error in its log")


def test_a_planning_rank_that_dies_ends_the_others(doomed):
    outcomes = doomed(2).outcomes(shared, "killed")
    assert outcomes[0] is None
    assert outcomes[1].kind == "TransferError", outcomes[1].trace
    assert "A process died" in outcomes[1].message
