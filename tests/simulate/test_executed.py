"""What the simulator calls executed is what executors can do, and who executes more is warned."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from foreroute.plan import Topology
from foreroute.plan.capabilities import EXECUTES, Ability, warn_of_lacks
from foreroute.planner import plan
from foreroute.simulate import simulate
from foreroute.simulate.methods import METHODS, PRESETS
from tests.plan.random_plans import LINKS
from tests.simulate.simulate_cases import small_config

RANKS = 4
ROWS = ("static", *PRESETS)


def test_static_and_plans_of_ours_are_what_executes_and_nothing_else_is():
    found = simulate(small_config(methods=METHODS))
    assert {method.name for method in found.methods if not method.not_executed} == set(ROWS)
    assert found["eplb_step"].not_executed == ("plans of other balancers",)
    assert found.as_dict()["methods"][0]["not_executed"] == ()


def test_a_plan_for_what_the_executor_lacks_is_warned_of(monkeypatch):
    counts = np.ones((1, 1, RANKS, 16), np.int64)
    across = plan(counts, Topology(RANKS, 2, 1, LINKS))
    with pytest.warns(UserWarning, match=r"several.*machine"):
        warn_of_lacks(across, "hf", "direct")
    gains = {"recompute": 0.0, "update": 0.5}
    uneven = plan(counts * np.arange(1, 17) ** 2, Topology(RANKS, RANKS, 1, LINKS))
    unpriced = replace(uneven, gains=gains, unpriced=("planning", "votes"))
    with pytest.warns(UserWarning, match="planning.*votes.*no price"):
        warn_of_lacks(unpriced, "hf", "host")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_lacks(uneven, "hf", "host")
        warn_of_lacks(replace(unpriced, gains=dict.fromkeys(gains, 0.0)), "hf", "host")
        monkeypatch.setitem(EXECUTES, "hf", EXECUTES["hf"] | {Ability.NODES})
        warn_of_lacks(across, "hf", "direct")
