"""Hosts that were made by hand and do not fit their counts: refused before a compiled loop goes by them."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.costs.links import served_loads
from foreroute.costs.pricing import parts_of_cells, slowest_attention, step_parts, work_of_cells
from foreroute.errors import PlanError
from foreroute.plan import Topology
from foreroute.plan.hosts import CellPlan
from foreroute.simulate import simulate
from foreroute.simulate.balancers import Balancer
from foreroute.simulate.compare import figures_of
from tests.costs.test_cell_figures import COSTS
from tests.plan.random_plans import LINKS, changed, random_counts, random_plan
from tests.simulate.simulate_cases import small_config

COUNTS = random_counts(0, (3, 2, 4, 8)).astype(np.int32)
TOPOLOGY = Topology(4, 2, 2, LINKS)
PLAN = random_plan(COUNTS, TOPOLOGY, seed=1)
PRICES = COSTS.prices(TOPOLOGY)


def hosts_with(name, place, value):
    return changed(PLAN, name, place, value).hosts


UNFIT = {
    "a rank below 0": (hosts_with("rank_R", 1, -1), "rank_R.*-1 to"),
    "an expert that is not there": (hosts_with("expert_R", 0, 8), "expert_R.*8.*0 to 7"),
    "a home that is not there": (hosts_with("home_LE", (1, 3), 9), "home_LE.*9.*0 to 3"),
    "offsets that go back": (hosts_with("offsets", 2, 0), "offsets"),
    "offsets beyond the replicas": (hosts_with("offsets", -1, 10_000), "offsets"),
    "offsets of fewer cells": (PLAN.hosts._replace(offsets=PLAN.hosts.offsets[:-1]), "offsets are 6.*expected 7"),
    "homes of fewer layers": (PLAN.hosts._replace(home_LE=PLAN.hosts.home_LE[:1]), r"home_LE.*\[1, 8\].*\[2, 8\]"),
    "fewer sources": (PLAN.hosts._replace(tokens_RG=PLAN.hosts.tokens_RG[:, :3].copy()), "tokens_RG.*3.*4"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_hosts_that_do_not_fit_are_refused_by_every_door(name):
    hosts, message = UNFIT[name]
    attention_ML2 = slowest_attention(COUNTS, COSTS)
    for door in (
        lambda: served_loads(hosts, COUNTS, 2),
        lambda: step_parts(hosts, COUNTS, TOPOLOGY, COSTS),
        lambda: parts_of_cells(hosts, COUNTS, attention_ML2, PRICES),
        lambda: work_of_cells(hosts, COUNTS, PRICES),
    ):
        with pytest.raises(PlanError, match=message):
            door()


def test_a_plan_that_was_made_by_hand_is_refused():
    hosts, message = UNFIT["an expert that is not there"]
    with pytest.raises(PlanError, match=message):
        figures_of(replace(PLAN, hosts=hosts), COUNTS, COSTS, label="mine", planning_s=0.0)


def test_a_balancer_of_users_that_names_no_rank_is_refused():
    def wrong(problem):
        for layer, counts_GE in problem.cells():
            home_E, one = problem.home_LE[layer].astype(np.int16), np.ones(1, np.int16)
            yield CellPlan(home_E, one, 20_000 * one, -one, one > 0, np.zeros((1, len(counts_GE)), np.int32))

    with pytest.raises(PlanError, match=r"rank_R.*20000.*0 to 3"):
        simulate(small_config(), balancers={"mine": Balancer("mine", "micro-step", wrong)})
