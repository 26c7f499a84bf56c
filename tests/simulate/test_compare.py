"""Figures of methods, and of the step that they serve, are what a plain count of every cell gives."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.balancers import OTHER_BALANCERS
from benchmarks.balancers.laer import crossing
from foreroute.costs.model import CostModel
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.costs.pricing import least_seconds, price_cell
from foreroute.errors import CountsError
from foreroute.plan import Topology
from foreroute.simulate import methods
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.compare import compare, facts_of, figures_of
from foreroute.simulate.methods import serve
from tests.plan.random_plans import LINKS, random_counts, random_plan

BALANCERS = methods.BALANCERS | OTHER_BALANCERS
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


@pytest.mark.parametrize(
    "name",
    # whose kernel takes numba longer than all others
    [pytest.param(name, marks=pytest.mark.slow if name == "laer" else ()) for name in [*BALANCERS, "a plan"]],
)
def test_figures_by_hand(name):
    given = problem()
    if name == "a plan":
        found = random_plan(given.counts_MLGE, given.topology, seed=1, moves=4)
        figures = figures_of(found, given.counts_MLGE, COSTS, label=name, planning_s=0.5)
        cells, before_LE = [found.cell(*cell) for cell in np.ndindex(3, 2)], found.previous_home_LE
        assert (figures.name, figures.label, figures.planning_s) == (name, name, 0.5)
    else:
        (figures,) = compare(given, COSTS, {name: BALANCERS[name]})
        cells, before_LE = serve(BALANCERS[name], given, COSTS).cells, given.home_LE
        assert (figures.name, figures.label) == (name, BALANCERS[name].label)
        assert figures.planning_s > 0
    crossing = total = 0
    for c, cell in enumerate(cells):
        place = divmod(c, 2)
        loads_G, away, all_of_it = count(cell, given.counts_MLGE[place])
        assert figures.loads_MLG[place].tolist() == loads_G
        assert figures.crossing_ML[place] == pytest.approx(away / max(all_of_it, 1))
        assert figures.imbalance_ML[place] == pytest.approx(max(loads_G) / all_of_it * 8 if all_of_it else 1)
        assert figures.fetches_ML[place] == cell.fetched_R.sum()
        one = price_cell(cell, given.counts_MLGE[place], given.topology, COSTS)
        assert np.array_equal(figures.parts_MLSP[place], one.parts_SP)
        crossing, total = crossing + away, total + all_of_it
    assert figures.cross_node_share == pytest.approx(crossing / total)
    assert figures.fetches_per_cell == figures.fetches_ML.sum() / 6
    assert figures.seconds == pytest.approx(figures.parts_MLSP.sum())
    assert figures.home_moves == sum((cells[layer].home_E != before_LE[layer]).sum() for layer in range(2))


def test_what_is_not_known_is_left_out():
    given = replace(problem(), previous_LE=None)
    assert [r.name for r in compare(given, COSTS)] == ["static", "eplb_step", "eplb_micro_step"]


def test_what_does_not_fit_is_refused():
    given = problem()
    for wrong in (
        replace(given, home_LE=given.home_LE[:1]),
        replace(given, previous_LE=given.previous_LE[:, :3]),
        replace(given, counts_MLGE=given.counts_MLGE[:, :, :4]),
        replace(given, counts_MLGE=given.counts_MLGE * 0.5),
    ):
        with pytest.raises(CountsError, match="expected"):
            list(compare(wrong, COSTS))
    found = random_plan(given.counts_MLGE, given.topology)
    for other in (given.counts_MLGE[:2], given.counts_MLGE[:, :, :4], given.counts_MLGE[..., :8]):
        with pytest.raises(CountsError, match=r"counts are \[.*\]; the plan is for \[3, 2, 8, 16\]"):
            figures_of(found, other, COSTS, label="other", planning_s=0.0)


def test_crossing_is_priced_in_all_passes():
    prices = COSTS.prices(problem().topology)
    # forward in the recompute, forward twice and backward once in the update
    assignment_s = 5 * prices.forward.row_s + 4.6 * prices.forward.pair_s
    assert crossing(replace(problem(), costs=COSTS)) == pytest.approx(8 * prices.cluster_row_s / assignment_s)


def test_facts_of_a_step_by_hand():
    counts, topology = random_counts(0, (3, 2, 4, 8), most=900), Topology(4, 2, 2, LINKS)
    counts[1, 1] = 0
    plan = random_plan(counts, topology, seed=1, moves=4)
    facts = facts_of(plan, counts, COSTS)
    assert facts.least_seconds == pytest.approx(least_seconds(counts, topology, COSTS).sum())
    assert facts.least_over_mean_ML[1, 1] == 1
    assert facts.least_over_mean_ML[0].tolist() == (plan.bound_ML[0] / (counts[0].sum(axis=(1, 2)) / 4)).tolist()


@pytest.mark.parametrize(
    ("seconds", "most_timings", "shortest"),
    [([0.04, 0.01, 0.02], 3, 0.01), ([0.2], 3, 0.2), ([0.04], 1, 0.04)],
    ids=["short", "long", "asked for once"],
)
def test_planning_is_timed_again_where_it_is_short(monkeypatch, seconds, most_timings, shortest):
    ticks = iter(np.repeat(np.cumsum([0.0, *seconds]), 2)[1:-1].tolist())
    monkeypatch.setattr(methods, "time", SimpleNamespace(process_time=lambda: next(ticks)))
    served = serve(methods.BALANCERS["eplb_step"], problem(), COSTS, most_timings=most_timings)
    assert served.planning_s == pytest.approx(shortest)
    assert not list(ticks)
    assert len(served.cells) == 6
