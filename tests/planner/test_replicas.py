"""Cells, their bounds and splits against every choice there is, flows and linear programs; and corners."""

from itertools import combinations

import numpy as np
import pytest

from benchmarks.harness.planner_oracles import best_split, cross_node_gap
from foreroute.plan import PlanOptions, Topology
from foreroute.planner import plan
from foreroute.simulate.eplb import even_split
from tests.plan.random_plans import LINKS, skewed_counts

EXACT = PlanOptions(tolerance=0.0, slots="shared")


def least_loads(demand_E, hosts_CE, num_ranks):
    """The least largest load of any split over hosts, sets of ranks as bits, in each of C cases.

    By minimum cuts: for some set of ranks, what only they host, per rank.
    """
    least_C = np.zeros(len(hosts_CE), np.int64)
    for ranks in range(1, 1 << num_ranks):
        inside_C = (hosts_CE & ~ranks == 0) @ demand_E.astype(np.int64)
        least_C = np.maximum(least_C, -(-inside_C // ranks.bit_count()))
    return least_C


def _all_choices(demand_E, home_E, num_ranks, slots=1):
    """Replicas and least load [C] of every way to fill the slots of all ranks."""
    foreign = [[e for e in range(len(demand_E)) if home_E[e] != g] for g in range(num_ranks)]
    guests = [[few for n in range(slots + 1) for few in combinations(experts, n)] for experts in foreign]
    picked_GC = np.indices([len(own) for own in guests]).reshape(num_ranks, -1)
    replicas_C, hosts_CE = 0, 1 << home_E.astype(np.int64)
    for g, (own, picked_C) in enumerate(zip(guests, picked_GC, strict=True)):
        is_guest_CE = np.array([np.isin(np.arange(len(demand_E)), few) for few in own])[picked_C]
        replicas_C, hosts_CE = replicas_C + is_guest_CE.sum(axis=1), hosts_CE | is_guest_CE << g
    return replicas_C, least_loads(demand_E, hosts_CE, num_ranks)


def test_balance_is_the_best_and_replicas_the_fewest_of_all_choices():
    """In 20 cells of 4 ranks."""
    counts, topology = skewed_counts(1, (20, 1, 4, 8)), Topology(4, 4, 1, LINKS)
    choices = [_all_choices(cell.sum(axis=0), np.repeat(np.arange(4), 2), 4) for cell in counts[:, 0]]
    found = plan(counts, topology, EXACT).max_load_ML[:, 0]
    best = np.array([load_C.min() for _, load_C in choices])
    assert (found >= best).all()
    assert (found == best).mean() >= 0.9
    assert found.sum() <= best.sum() * 1.002
    found = plan(counts, topology, PlanOptions(tolerance=0.1, slots="shared"))
    targets = np.ceil(counts.sum(axis=(1, 2, 3)) * 1.1 / 4)
    reached, fewest = 0, 0
    for m, (replicas_C, load_C) in enumerate(choices):
        enough = replicas_C[load_C <= targets[m]]
        if len(enough) and found.max_load_ML[m, 0] <= targets[m]:
            least = enough.min()
            assert found.num_replicas_ML[m, 0] >= least
            reached += found.num_replicas_ML[m, 0]
            fewest += least
    assert 0 < reached <= fewest * 1.02


@pytest.mark.parametrize(("num_ranks", "num_experts", "slots"), [(2, 4, 0), (2, 4, 1), (2, 6, 2), (3, 3, 1), (3, 6, 1)])
def test_no_plan_beats_the_bound_and_it_is_mostly_reached(num_ranks, num_experts, slots):
    rng = np.random.default_rng(num_ranks * 100 + num_experts * 10 + slots)
    reached, cases = 0, 12
    for _ in range(cases):
        load_E = rng.integers(0, 30, num_experts) ** rng.integers(1, 3)
        home_E = rng.permutation(np.arange(num_experts) % num_ranks).astype(np.int16)
        counts = np.zeros((1, 1, num_ranks, num_experts), np.int32)
        counts[0, 0, 0] = load_E
        stated = plan(counts, Topology(num_ranks, num_ranks, slots, LINKS), home_LE=home_E[None]).bound_ML
        bound, best = int(stated[0, 0]), _all_choices(load_E, home_E, num_ranks, slots)[1].min()
        assert bound <= best
        assert bound >= -(-load_E.sum() // num_ranks)
        reached += bound == best
    assert reached >= cases // 2


@pytest.mark.parametrize("redundant", [0, 1, 2])
@pytest.mark.parametrize("slots", ["shared", "layer"])
def test_no_split_over_the_same_replicas_is_flatter(redundant, slots):
    counts = skewed_counts(7, (12, 3, 8, 32), 0.15)
    options = PlanOptions(tolerance=0.0, slots=slots)
    found = plan(counts, Topology(8, 4, redundant, LINKS), options)
    np.testing.assert_array_equal(found.max_load_ML, best_split(counts, found))


@pytest.mark.parametrize("slots", ["shared", "layer"])
@pytest.mark.parametrize("tolerance", [0.0, 0.02])
def test_a_plan_with_locality_is_at_the_least_and_one_without_is_not(tolerance, slots):
    rng = np.random.default_rng(0)
    counts = rng.poisson(rng.pareto(1.5, (2, 2, 4, 1, 16)).repeat(2, axis=3) * 30).reshape(2, 2, 8, 16)
    near, far = (PlanOptions(tolerance=tolerance, slots=slots, locality=on) for on in (True, False))
    gaps = [cross_node_gap(plan(counts, Topology(8, 2, 2, LINKS), each), counts, tolerance, 4) for each in (near, far)]
    assert -1e-9 <= gaps[0] < 5e-3
    assert gaps[1] > 0.01


def test_even_splits_are_even_for_every_source_and_in_all():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        counts_GE, expert_H = rng.integers(0, 40, (6, 9)), np.repeat(np.arange(9), rng.integers(1, 5, 9))
        copies_H = rng.integers(1, 3, len(expert_H)).astype(np.int32)
        tokens_HG = even_split(expert_H.astype(np.int32), copies_H, counts_GE)
        share_H = copies_H / np.bincount(expert_H, copies_H)[expert_H]
        np.testing.assert_array_equal([tokens_HG[expert_H == e].sum(axis=0) for e in range(9)], counts_GE.T)
        assert (abs(tokens_HG - counts_GE.T[expert_H] * share_H[:, None]) < copies_H[:, None]).all()
        assert (abs(tokens_HG.sum(axis=1) - counts_GE.sum(axis=0)[expert_H] * share_H) < copies_H).all()
