"""Everything that the options name takes effect in `plan`, or is refused."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.costs.model import CostModel
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.errors import ConfigError
from foreroute.plan import PlanOptions, Topology, verify
from foreroute.planner import plan, plan_and_why
from tests.costs.cost_oracle import price_cell, price_plan
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


def test_counts_that_are_packed_are_not_packed_by_routes():
    with pytest.raises(ConfigError, match=r"'routes'.*pack_sequences"):
        plan(counts(), TOPOLOGY, PlanOptions(packing="routes"))


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


def test_what_needs_prices_is_refused_without():
    for options in (PlanOptions(slots="shared", traffic=True), PlanOptions(pay_off=True)):
        with pytest.raises(ConfigError, match=r"priced.*model"):
            plan(counts(), TOPOLOGY, options)
