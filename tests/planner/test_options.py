"""Everything that the options name takes effect in plan, or is refused; in which passes a plan is executed."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.costs.model import CostModel
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.errors import ConfigError
from foreroute.plan import CellPlan, PlanOptions, Topology, verify
from foreroute.plan.options import PASS_NAMES
from foreroute.plan.step_plan import LEAST_GAIN
from foreroute.planner import plan, plan_and_why
from tests.costs.cost_oracle import oracle, price_cell, price_plan
from tests.plan.random_plans import LINKS

MODEL = replace(model_preset("qwen3-30b-a3b"), num_experts=16, top_k=2)
COSTS = CostModel(model=MODEL, hardware=hardware_preset("h100"))
FREE = replace(COSTS, trial_s_per_count=0.0)
SLOW_HOST = CostModel(model=replace(MODEL, hidden=7168), hardware=hardware_preset("h100"), paths="host")
TOPOLOGY = Topology(8, 4, 2, LINKS)


def counts(seed=0, scale=40):
    rng = np.random.default_rng(seed)
    return rng.poisson(rng.pareto(2.0, (4, 3, 1, 16)) * scale, (4, 3, 8, 16))


def same(a, b):
    return all(np.array_equal(a.tensors[name], b.tensors[name]) for name in a.tensors)


@pytest.mark.parametrize("slots", ["layer", "shared"])
def test_replicas_that_do_not_pay_are_declined(slots):
    given = counts(2)
    options = PlanOptions(tolerance=0.0, slots=slots, traffic=False)
    keeping = replace(options, pay_off=False)
    kept, paid = (plan(given, TOPOLOGY, o, costs=SLOW_HOST) for o in (keeping, options))
    verify(paid, given, options)
    assert paid.hosts.fetched_R.sum() < kept.hosts.fetched_R.sum()
    assert price_plan(paid, given, SLOW_HOST).sum() < price_plan(kept, given, SLOW_HOST).sum()
    plenty = counts(2, 40_000)
    kept, paid = (plan(plenty, TOPOLOGY, o, costs=SLOW_HOST) for o in (keeping, options))
    assert same(kept, paid), "nothing is exposed, so nothing is declined"
    assert same(plan(given, TOPOLOGY, options), plan(given, TOPOLOGY, keeping)), "nothing is priced"


def test_options_left_open_are_on_where_they_pay_and_say_why():
    many, one_node = replace(TOPOLOGY, redundant_slots=6), replace(TOPOLOGY, ranks_per_node=8)
    paying = "on: where it saves time"
    for topology, options, costs, pay_off, traffic in [
        (many, PlanOptions(slots="shared"), COSTS, paying, paying),
        (many, PlanOptions(), COSTS, paying, paying),
        (one_node, PlanOptions(slots="shared"), FREE, paying, "off: all ranks share a node"),
        (one_node, PlanOptions(slots="shared", traffic=True), FREE, paying, "off: all ranks share a node"),
        (many, PlanOptions(slots="shared"), None, "off: nothing is priced", "off: nothing is priced"),
        (many, PlanOptions(replicas=False), COSTS, "off: there are no replicas", "off: there are no replicas"),
        (many, PlanOptions(slots="shared", traffic=True, pay_off=False), COSTS, "off: asked for", "on: asked for"),
    ]:
        found, why = plan_and_why(counts(1, 4000), topology, options, costs=costs)
        stages = {pass_name: found.decision(pass_name) for pass_name in ("recompute", "update")}
        assert why == {"pay_off": pay_off, "traffic": traffic, **stages}
        forced = replace(options, pay_off=pay_off.startswith("on"), traffic=traffic.startswith("on"))
        assert same(found, plan(counts(1, 4000), topology, forced, costs=costs))


@pytest.mark.parametrize("seed", range(2))
def test_options_are_off_in_layers_where_planning_them_takes_more_than_they_save(seed):
    """Decided anew here: from plans with both on and off everywhere."""
    given, topology = counts(seed, 300), replace(TOPOLOGY, redundant_slots=6)
    auto = PlanOptions(slots="shared")
    plans = [plan(given, topology, replace(auto, pay_off=is_on, traffic=is_on), costs=COSTS) for is_on in (False, True)]
    saved_L = []
    for layer in range(3):
        cells = [each.cell(0, layer) for each in plans]
        off, on = (price_cell(cell, given[0, layer], topology, COSTS) for cell in cells)
        saved_L.append(float(off.sum() - on.sum()))
    assert min(saved_L) > 0
    # one plan for pay-off; for traffic the one to beat, and with each of three limits 6, 4, 3, 2 and 1 slots
    entries = (1 + 1 + 3 * 5) * 8 * 16
    # a little beside what is saved: where both are equal, rounding decides
    for plan_s in (min(saved_L) / 5, *(0.99 * saved for saved in sorted(saved_L)[:2]), sum(saved_L)):
        is_on_L = [saved > plan_s for saved in saved_L]
        options = replace(auto, threads=1 + seed % 2)
        found, why = plan_and_why(given, topology, options, costs=replace(COSTS, trial_s_per_count=plan_s / entries))
        for m, layer in np.ndindex(4, 3):
            mine, expected = found.cell(m, layer), plans[is_on_L[layer]].cell(m, layer)
            assert all(np.array_equal(getattr(mine, name), getattr(expected, name)) for name in mine._fields)
        num_off = is_on_L.count(False)
        assert (f"in {num_off} of 3 layers" in why["traffic"]) == (num_off > 0)
        assert why["traffic"].startswith("on: except in ") == (0 < num_off < 3)
        assert why["pay_off"].startswith("off" if num_off == 3 else "on")
    assert num_off == 3, "the last one costs more than all of them save"


def test_what_needs_prices_or_sequences_is_refused_without():
    for options, words in (
        (PlanOptions(slots="shared", traffic=True), r"priced.*model"),
        (PlanOptions(pay_off=True), r"priced.*model"),
        (PlanOptions(packing="routes"), r"'routes'.*pack_sequences"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan(counts(), TOPOLOGY, options)


SMALL = replace(model_preset("qwen3-30b-a3b"), num_experts=8, top_k=2)
H100 = replace(
    hardware_preset("h100"), replica_s=3e-5, replica_backward_s=1e-4, backward_products=2.5, publish_bytes_per_s=3e11
)
PRICED = CostModel(model=SMALL, hardware=H100, trial_s_per_count=0.0, plan_s_per_count=2e-8, begin_s=1e-5)
FOUR_RANKS = Topology(4, 2, 2, LINKS)
SHAPE = (3, 2, 4, 8)


def even_counts(seed, scale=400):
    rng = np.random.default_rng(seed)
    return rng.poisson(rng.pareto(2.0, (*SHAPE[:2], 1, SHAPE[3])) * scale, SHAPE) * 2


def seconds_by_hand(cells, given, costs):
    """Seconds of both passes: cell by cell of the oracle."""
    each = zip(cells, given.reshape(-1, *SHAPE[2:]), strict=True)
    parts = [oracle(cell, counts_GE, FOUR_RANKS, costs)[0] for cell, counts_GE in each]
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
    given, costs = even_counts(seed), replace(PRICED, paths=paths)
    found, why = plan_and_why(given, FOUR_RANKS, costs=costs)
    cells = [found.cell(*cell) for cell in np.ndindex(*SHAPE[:2])]
    at_home = [CellPlan.homes_only(cell.home_E, 4) for cell in cells]
    planned_s, home_s = seconds_by_hand(cells, given, costs), seconds_by_hand(at_home, given, costs)
    for pass_name in PASS_NAMES:
        gain = 1 - (planned_s[pass_name] + once(costs, cells)) / home_s[pass_name]
        assert found.gains[pass_name] == pytest.approx(gain, rel=1e-9, abs=1e-12)
        assert found.is_at_home(pass_name) == (gain < LEAST_GAIN)
        assert why[pass_name] == found.decision(pass_name)


def test_one_percent_decides_and_each_stage_for_itself():
    """What a step takes once is set so that the gain of one pass is just above 1 %, and just below."""
    given = even_counts(0, 4000)
    free = replace(PRICED, plan_s_per_count=0.0, begin_s=0.0, paths="direct")
    found = plan(given, FOUR_RANKS, costs=free)
    home_s = seconds_by_hand(
        [CellPlan.homes_only(home_E, 4) for _ in range(SHAPE[0]) for home_E in found.home_LE], given, free
    )
    for pass_name, other in (PASS_NAMES, PASS_NAMES[::-1]):
        most_s = (found.gains[pass_name] - LEAST_GAIN) * home_s[pass_name]
        for share, is_at_home in ((1 - 1e-6, False), (1 + 1e-6, True)):
            decided, why = plan_and_why(given, FOUR_RANKS, costs=replace(free, begin_s=most_s * share))
            assert decided.gains[pass_name] == pytest.approx(LEAST_GAIN, rel=1e-4)
            assert decided.is_at_home(pass_name) == is_at_home
            assert decided.unpriced == ("planning",)
            decision = "at homes: the plan would save 1.0%" if is_at_home else "by the plan: it saves 1.0%"
            assert why[pass_name].startswith(decision)
            expected = found.gains[other] - most_s * share / home_s[other]
            assert decided.gains[other] == pytest.approx(expected, rel=1e-9)
