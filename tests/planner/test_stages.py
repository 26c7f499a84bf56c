"""In which passes a plan is executed: its gain against the slow oracle of cells, and what is decided at 1 %."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.costs.model import CostModel
from foreroute.costs.presets import HARDWARE, MODELS
from foreroute.plan import CellPlan, Topology
from foreroute.plan.options import PASS_NAMES
from foreroute.plan.step_plan import LEAST_GAIN
from foreroute.planner import plan, plan_and_why
from tests.costs.cost_oracle import oracle
from tests.plan.random_plans import LINKS

MODEL = replace(MODELS["qwen3-30b-a3b"], num_experts=8, top_k=2)
HARDWARE_ = replace(
    HARDWARE["h100"],
    replica_s=3e-5,
    replica_backward_s=1e-4,
    backward_products=2.5,
    publish_bytes_per_s=3e11,
)
COSTS = CostModel(model=MODEL, hardware=HARDWARE_, trial_s_per_count=0.0, plan_s_per_count=2e-8, begin_s=1e-5)
TOPOLOGY = Topology(4, 2, 2, LINKS)
SHAPE = (3, 2, 4, 8)


def counts(seed, scale=400):
    rng = np.random.default_rng(seed)
    return rng.poisson(rng.pareto(2.0, (*SHAPE[:2], 1, SHAPE[3])) * scale, SHAPE) * 2


def by_hand(cells, given, costs):
    """Seconds of both passes: cell by cell of the oracle."""
    each = zip(cells, given.reshape(-1, *SHAPE[2:]), strict=True)
    parts = [oracle(cell, counts_GE, TOPOLOGY, costs)[0] for cell, counts_GE in each]
    return {name: sum(sum(of_cell[name].values()) for of_cell in parts) for name in PASS_NAMES}


def once(costs, cells):
    """Planning of 3 x 2 cells of 4 x 8 counts, votes, and what the busiest rank lends its neighbour by host memory."""
    lent = {
        (int(cell.home_E[expert]), number % SHAPE[1], int(expert))
        for number, cell in enumerate(cells)
        for expert, rank in zip(cell.expert_R, cell.rank_R, strict=True)
        if cell.home_E[expert] != rank and cell.home_E[expert] // 2 == rank // 2
    }
    most = max([home for home, _, _ in lent].count(rank) for rank in range(4))
    published = most * 3 * 2048 * 768 * 2 / 3e11 if costs.paths == "host" else 0.0
    return 3 * 2 * 4 * 8 * 2e-8 + 1e-5 + published


@pytest.mark.parametrize("paths", ["host", "direct"])
@pytest.mark.parametrize("seed", range(3))
def test_gains_are_those_of_the_oracle(seed, paths):
    given, costs = counts(seed), replace(COSTS, paths=paths)
    found, why = plan_and_why(given, TOPOLOGY, costs=costs)
    cells = [found.cell(*cell) for cell in np.ndindex(*SHAPE[:2])]
    at_home = [CellPlan.homes_only(cell.home_E, 4) for cell in cells]
    planned_s, home_s = by_hand(cells, given, costs), by_hand(at_home, given, costs)
    for pass_name in PASS_NAMES:
        gain = 1 - (planned_s[pass_name] + once(costs, cells)) / home_s[pass_name]
        assert found.gains[pass_name] == pytest.approx(gain, rel=1e-9, abs=1e-12)
        assert found.is_at_home(pass_name) == (gain < LEAST_GAIN)
        assert why[pass_name] == found.decision(pass_name)


def test_one_percent_decides_and_each_stage_for_itself():
    """What a step takes once is set so that the gain of one pass is just above 1 %, and just below."""
    given = counts(0, 4000)
    free = replace(COSTS, plan_s_per_count=0.0, begin_s=0.0, paths="direct")
    found = plan(given, TOPOLOGY, costs=free)
    home_s = by_hand([CellPlan.homes_only(home_E, 4) for _ in range(SHAPE[0]) for home_E in found.home_LE], given, free)
    for pass_name, other in (PASS_NAMES, PASS_NAMES[::-1]):
        most_s = (found.gains[pass_name] - LEAST_GAIN) * home_s[pass_name]
        for share, is_at_home in ((1 - 1e-6, False), (1 + 1e-6, True)):
            decided, why = plan_and_why(given, TOPOLOGY, costs=replace(free, begin_s=most_s * share))
            assert decided.gains[pass_name] == pytest.approx(LEAST_GAIN, rel=1e-4)
            assert decided.is_at_home(pass_name) == is_at_home
            assert decided.unpriced == ("planning",)
            words = "at homes: the plan would save 1.0%" if is_at_home else "by the plan: it saves 1.0%"
            assert why[pass_name].startswith(words)
            expected = found.gains[other] - most_s * share / home_s[other]
            assert decided.gains[other] == pytest.approx(expected, rel=1e-9)
