"""Everything that the options name takes effect in `plan`, or is refused."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.costs.model import CostModel
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.errors import ConfigError
from foreroute.plan import PlanOptions, Topology, verify
from foreroute.planner import plan, plan_and_why
from tests.costs.cost_oracle import price_plan
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


def test_what_needs_prices_is_refused_without():
    for options in (PlanOptions(slots="shared", traffic=True), PlanOptions(pay_off=True)):
        with pytest.raises(ConfigError, match=r"priced.*model"):
            plan(counts(), TOPOLOGY, options)
