"""Figures of methods, and of the step that they serve, are what a plain count of every cell gives."""

from dataclasses import replace

import numpy as np
import pytest

from foreroute.costs.model import CostModel
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.costs.pricing import step_parts
from foreroute.plan import Topology
from foreroute.plan.options import PASS_NAMES
from foreroute.simulate import methods
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.compare import TimedPlan, compare, compare_plan, figures_of
from foreroute.simulate.methods import ServedStep, serve
from tests.plan.random_plans import LINKS, random_plan

BALANCERS = methods.BALANCERS
COSTS = CostModel(model=model_preset("qwen3-30b-a3b"), hardware=hardware_preset("h100"))


def problem(seed=0):
    rng = np.random.default_rng(seed)
    counts = rng.poisson(rng.pareto(2.0, (3, 2, 1, 16)) * 40, (3, 2, 8, 16))
    counts[1, 1] = 0
    topology = Topology(8, 4, 2, LINKS)
    return BalancerInput(counts, topology, np.tile(topology.contiguous_home_E(16), (2, 1)), counts.sum(axis=(0, 2)))


def count(cell, counts_GE):
    """Count a cell: what each rank serves, how many assignments cross nodes of four, and how many there are."""
    loads_G, away, rest_GE = [0] * 8, 0, counts_GE.astype(int)
    for expert, rank, tokens_G in zip(cell.expert_R, cell.rank_R, cell.tokens_RG, strict=True):
        rest_GE[:, expert] -= tokens_G
        loads_G[rank] += int(tokens_G.sum())
        away += sum(int(tokens) for g, tokens in enumerate(tokens_G) if g // 4 != rank // 4)
    for (g, expert), tokens in np.ndenumerate(rest_GE):
        home = cell.home_E[expert]
        loads_G[home] += int(tokens)
        away += int(tokens) * (g // 4 != home // 4)
    return loads_G, away, int(counts_GE.sum())


@pytest.mark.parametrize("name", ["static", "eplb_micro_step", "a plan"])
def test_figures_by_hand(name):
    given = problem()
    if name == "a plan":
        found = random_plan(given.counts_MLGE, given.topology, seed=1, moves=4)
        record = figures_of(found, given.counts_MLGE, COSTS, label=name, planning_s=0.5)
        served = ServedStep.of(found, given.counts_MLGE)
        assert (record.name, record.label, record.planning_s) == (name, name, 0.5)
    else:
        (record,) = compare(given, COSTS, {name: BALANCERS[name]})
        served = serve(BALANCERS[name], given, COSTS)
        assert (record.name, record.label) == (name, BALANCERS[name].label)
        assert record.planning_s > 0
    loads = served.loads(given.topology)
    crossing, total, fetches, ratios = 0, 0, 0, []
    for m, layer in np.ndindex(3, 2):
        cell, counts_GE = served.passes[0].cell(m, layer), given.counts_MLGE[m, layer]
        loads_G, away, all_of_it = count(cell, counts_GE)
        assert loads.served_SMLG[:, m, layer].tolist() == [loads_G] * 2
        assert loads.crossing_SML[:, m, layer].tolist() == [away] * 2
        ratios.append(max(loads_G) / all_of_it * 8 if all_of_it else 1)
        fetches += sum(cell.fetched_R & (cell.home_E[cell.expert_R] != cell.rank_R))
        crossing, total = crossing + away, total + all_of_it
    assert record.imbalance == pytest.approx(np.mean(ratios))
    assert (record.imbalance_99, record.imbalance_worst) == pytest.approx((np.quantile(ratios, 0.99), max(ratios)))
    assert record.cross_node_share == pytest.approx(crossing / total)
    assert record.fetches_per_cell == pytest.approx(fetches / 6)
    assert record.home_moves == (served.home_LE != served.before_LE).sum()
    parts_SP = step_parts(served.passes[0], served.counts_MLGE.astype(np.int32), given.topology, COSTS, served.slots)
    assert record.pass_s == pytest.approx(parts_SP.sum(axis=1))
    assert record.training_s == pytest.approx(parts_SP.sum())


@pytest.mark.parametrize("at_home", [(), ("recompute",), ("update",), ("recompute", "update")])
def test_a_pass_that_gains_too_little_is_that_of_homes(at_home):
    """As executors run it: `ep` asks `StepPlan.in_pass` too."""
    given = problem()
    found = random_plan(given.counts_MLGE, given.topology, seed=1)
    given = replace(given, home_LE=found.home_LE, costs=COSTS)
    gains = {name: 0.009 if name in at_home else 0.01 for name in PASS_NAMES}
    found = replace(found, gains=gains, priced_paths="direct")
    resting = replace(found, gains=dict.fromkeys(PASS_NAMES, 0.0)).in_pass("update")  # every expert at its home
    whole, homes = (
        figures_of(one, given.counts_MLGE, COSTS, label="", planning_s=0.0)
        for one in (replace(found, gains={}), found.in_pass("update") if "update" in at_home else resting)
    )
    assert whole.training_s != homes.training_s
    compared = compare_plan(TimedPlan(found, {}, 0.0, 0.1), given, {"static": BALANCERS["static"]})
    static, *_, record = compared.methods
    assert record.pass_s == tuple((homes if name in at_home else whole).pass_s[s] for s, name in enumerate(PASS_NAMES))
    assert record.imbalance == pytest.approx(
        np.mean([(homes if n in at_home else whole).imbalance for n in PASS_NAMES])
    )
    assert static.training_s == pytest.approx(homes.training_s)
    assert compared.passes_by_plan == [name for name in PASS_NAMES if name not in at_home]
    assert np.array_equal(compared.planned.served_SMLG[0].max(axis=-1), found.max_load_ML)
    assert compared.least_over_mean_ML[1, 1] == 1, "an empty cell"
    assert 0 < compared.least_s <= min(whole.training_s, homes.training_s)
    mean_L = given.counts_MLGE[0].sum(axis=(1, 2)) / 8
    assert compared.least_over_mean_ML[0].tolist() == (found.bound_ML[0] / mean_L).tolist()
