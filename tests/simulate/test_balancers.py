"""Baselines serve every assignment and place as published; figures are those of a plain count of every cell."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.balancers import OTHER_BALANCERS
from foreroute.costs.model import CostModel
from foreroute.costs.presets import hardware_preset, model_preset
from foreroute.costs.pricing import step_parts
from foreroute.errors import CountsError
from foreroute.plan import Topology
from foreroute.plan.options import PASS_NAMES
from foreroute.simulate import methods
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.compare import TimedPlan, compare, compare_plan, figures_of
from foreroute.simulate.eplb import eplb_placement
from foreroute.simulate.methods import ServedStep, serve
from tests.plan.random_plans import LINKS, random_plan

BALANCERS = methods.BALANCERS | OTHER_BALANCERS
# numba compiles this one, which takes longer than all tests of the others
NAMES = [pytest.param(name, marks=pytest.mark.exhaustive if name == "laer" else ()) for name in BALANCERS]
COSTS = CostModel(model=model_preset("qwen3-30b-a3b"), hardware=hardware_preset("h100"))


def problem(seed, *, ranks=8, per_node=4, experts=16, slots=2, micro_steps=3, layers=2, skew=1.0):
    rng = np.random.default_rng(seed)
    shape = (micro_steps, layers, ranks, experts)
    weight = rng.pareto(1.0, (micro_steps, layers, 1, experts)) * skew + rng.random((1, 1, 1, experts))
    counts = rng.poisson(np.broadcast_to(weight * 8, shape)) * (rng.random(shape) < 0.9)
    topology = Topology(ranks, per_node, slots, LINKS)
    home = np.stack([rng.permutation(topology.contiguous_home_LE(1, experts)[0]) for _ in range(layers)])
    return BalancerInput(counts, topology, home, counts.sum(axis=(0, 2)) + 1, COSTS)


CASES = [
    {"seed": 1, "slots": 0},
    {"seed": 3, "ranks": 16, "per_node": 4, "experts": 16, "slots": 3},
    {"seed": 5, "ranks": 1, "per_node": 1, "experts": 4, "slots": 1},
    {"seed": 6, "skew": 20.0},
    {"seed": 7, "ranks": 6, "per_node": 3, "experts": 12, "slots": 4},
]


@pytest.mark.parametrize("name", NAMES)
def test_assignments_are_valid(name):
    for case in CASES:
        check(problem(**case), name)
    empty = problem(0)
    counts = np.zeros_like(empty.counts_MLGE)
    check(replace(empty, counts_MLGE=counts), name)
    counts[1, :, :, 3] = 17
    check(replace(empty, counts_MLGE=counts), name)


def check(given, name):
    num_micro_steps, num_layers = given.counts_MLGE.shape[:2]
    before, found = [set() for _ in range(num_layers)], list(BALANCERS[name].method(given))
    assert len(found) == num_micro_steps * num_layers
    for c, cell in enumerate(found):
        micro_step, layer = divmod(c, num_layers)
        home_tokens_GE = cell.home_tokens_GE(given.counts_MLGE[micro_step, layer])
        assert min(home_tokens_GE.min(), cell.tokens_RG.min(initial=0)) >= 0
        replicas = list(zip(cell.expert_R.tolist(), cell.rank_R.tolist(), strict=True))
        assert len(set(replicas)) == len(replicas)
        homes = set(enumerate(cell.home_E.tolist()))
        assert homes == set(enumerate(found[layer].home_E.tolist()))
        # a home that serves nothing may have given its expert up
        serving = {(e, rank) for e, rank in homes if home_tokens_GE[:, e].any()}
        assert np.bincount([rank for _, rank in {*replicas, *serving}], minlength=1).max() <= given.experts_per_rank
        for replica, fetched in zip(replicas, cell.fetched_R.tolist(), strict=True):
            held = replica in before[layer] or (micro_step == 0 and given.home_LE[layer, replica[0]] == replica[1])
            assert fetched == (not held)
            assert fetched or replica not in homes
        # slots of LLEP hold nothing from cell to cell
        before[layer] = set() if name == "llep" else {*replicas, *serving}


@pytest.mark.parametrize(("field", "place", "value"), [("tokens_RG", (0, 0), 10_000), ("rank_R", slice(None), 0)])
def test_the_check_sees_what_is_wrong(field, place, value, monkeypatch):
    method = BALANCERS["llep"].method

    def spoiled(given):
        for c, cell in enumerate(method(given)):
            if c == 3:
                getattr(cell, field)[place] = value
            yield cell

    monkeypatch.setitem(BALANCERS, "llep", replace(BALANCERS["llep"], method=spoiled))
    with pytest.raises(AssertionError):
        check(problem(0), "llep")


README_LOADS = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
README_MAP = [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]]


def published(loads_E, num_copies, num_ranks):
    """The expert in every place, by the published algorithm in its form without groups: float32, ties to the lower."""
    loads_E, copies_E, expert_C = loads_E.astype(np.float32), np.ones(len(loads_E), np.float32), [*range(len(loads_E))]
    while len(expert_C) < num_copies:
        expert_C.append(int((loads_E / copies_E).argmax()))
        copies_E[expert_C[-1]] += 1
    load_C, held, sums = (loads_E / copies_E)[expert_C], [[] for _ in range(num_ranks)], [np.float32(0)] * num_ranks
    for copy in np.argsort(-load_C, kind="stable"):
        rank = min((g for g in range(num_ranks) if len(held[g]) < num_copies // num_ranks), key=sums.__getitem__)
        held[rank].append(expert_C[copy])
        sums[rank] += load_C[copy]
    return [expert for of_rank in held for expert in of_rank]


@pytest.mark.parametrize("shape", [(12, 16, 8), (128, 144, 8), (128, 160, 16), (64, 64, 8)])
@pytest.mark.parametrize("ties", [False, True])
def test_equal_to_the_published_form(shape, ties):
    """Of these experts, copies and ranks."""
    rng = np.random.default_rng(shape[1])
    loads_LE = rng.integers(0, 4, (2, shape[0])) if ties else rng.dirichlet(np.ones(shape[0]), 2) * 500_000
    for loads_E in loads_LE.astype(int):
        assert eplb_placement(loads_E, *shape[1:]).tolist() == published(loads_E, *shape[1:])


@pytest.mark.parametrize("place", [eplb_placement, published])
def test_places_are_those_of_the_published_example(place):
    """Of its two nodes, each has the experts of two groups, eight copies and four ranks."""
    for loads_E, expert_P in zip(np.array(README_LOADS), README_MAP, strict=True):
        for here_P in (expert_P[:8], expert_P[8:]):
            experts = np.unique(here_P)
            assert experts[place(loads_E[experts], 8, 4)].tolist() == here_P


def test_a_step_that_balancers_cannot_plan_is_refused():
    given = problem(0)
    with pytest.raises(CountsError, match="step before"):
        methods.serve(BALANCERS["eplb_previous"], replace(given, previous_LE=None), COSTS)
    for wrong in ({"home_LE": given.home_LE[:1]}, {"previous_LE": given.previous_LE[:, :-1]}):
        with pytest.raises(CountsError, match=r"expected \[M, L, G, E\]"):
            list(compare(replace(given, **wrong), COSTS, BALANCERS))


def with_an_empty_cell():
    given = problem(0)
    given.counts_MLGE[1, 1] = 0
    return given


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
    given = with_an_empty_cell()
    if name == "a plan":
        found = random_plan(given.counts_MLGE, given.topology, seed=1, moves=4)
        record = figures_of(found, given, COSTS, label=name, planning_s=0.5)
        served = ServedStep.of(found, given)
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
    given = with_an_empty_cell()
    found = random_plan(given.counts_MLGE, given.topology, seed=1)
    given = replace(given, home_LE=found.home_LE, costs=COSTS)
    gains = {name: 0.009 if name in at_home else 0.01 for name in PASS_NAMES}
    found = replace(found, gains=gains, priced_paths="direct")
    resting = replace(found, gains=dict.fromkeys(PASS_NAMES, 0.0)).in_pass("update")  # every expert at its home
    whole, homes = (
        figures_of(one, given, COSTS, label="", planning_s=0.0)
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
