"""What a balancer serves is executed as it stands: the same loads, in a plan that the checker takes."""

import numpy as np
import pytest

from benchmarks.nodes import executable
from foreroute.plan import verify
from foreroute.simulate.eplb import eplb_previous
from tests.simulate.test_balancers import problem


@pytest.mark.parametrize(
    "case", [{"seed": 0}, {"seed": 3, "ranks": 4, "experts": 32, "layers": 3}, {"seed": 4, "experts": 64}]
)
def test_the_plan_of_eplb_serves_what_eplb_serves(case):
    step = problem(**case)
    cells = list(eplb_previous(step))
    plan = executable(step, cells)
    verify(plan, step.counts_MLGE)
    for number, (_, counts_GE) in enumerate(step.cells()):
        place = np.unravel_index(number, plan.shape[:2])
        assert (plan.cell(*map(int, place)).loads_G(counts_GE) == cells[number].loads_G(counts_GE)).all()
    assert plan.num_replicas_ML.any()
