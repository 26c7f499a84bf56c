"""Options of the planner in plans of a trainer: each reaches the plan, or is refused."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from foreroute.costs import hardware_preset
from foreroute.errors import ConfigError
from foreroute.plan import PlanOptions
from foreroute.trainers.plans import PlannedPasses, plan_options

TOPOLOGY = hardware_preset("h100").topology(num_ranks=2, redundant_slots=2)


class Routed:
    """Executes nothing, and keeps what it is given to execute; a micro-batch is its counts [L, G, E]."""

    home_LE = np.array([[0, 0, 1, 1]])

    def __init__(self):
        self.executed = []
        self.spread = SimpleNamespace(gather_executed=lambda _: np.zeros((1, 1, 2), np.int64))

    def gather_counts(self, micro_batches):
        return np.stack(micro_batches)

    def share_plan(self, make):
        return make()

    def execute(self, plan, counts_MLGE, micro_batches):
        self.executed.append(plan)
        return nullcontext(SimpleNamespace(passes={"update": SimpleNamespace(plan=plan)}))


def replicas(given):
    routed, counts_LGE = Routed(), np.array([[[40, 20, 20, 10], [40, 20, 20, 10]]])
    with PlannedPasses(routed, TOPOLOGY, None, plan_options(given, None, packs=True)).executing([counts_LGE], "update"):
        pass
    [plan] = routed.executed
    return int(plan.num_replicas_ML.sum())


def test_options_reach_the_plan():
    # the slowest rank has 4/3 of the mean at home
    assert replicas({}) > 0 == replicas({"tolerance": 0.5})
    assert replicas(PlanOptions(tolerance=0.5)) == 0
    assert replicas({"packing": "routes"}) > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tolerence": 0}, r"tolerence.*tolerance\?"),
        ({"tolerance": 2}, "tolerance.*below 1"),
        ("tolerance=0", "'tolerance=0'.*table"),
        ({"home_moves": 4}, "home_moves=4.*expected 0"),
        ({"replicas": False}, "replicas=False.*expected True"),
        ({"traffic": True, "pay_off": True}, r"traffic.*pay_off.*prices"),
        ({"packing": "routes"}, "'routes'.*'length'"),
    ],
)
def test_options_that_are_unknown_or_not_carried_out_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        plan_options(given, None)
