"""Splits over given hosts, against linear programs and brute force; and what locality leaves to cross nodes."""

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog

from benchmarks.harness.planner_oracles import CellHosts, cross_node_gap, least_crossing, level_quotas
from foreroute.plan import PlanOptions, Topology
from foreroute.planner import plan
from foreroute.simulate.eplb import even_split
from tests.plan.random_plans import LINKS

NODE_G = np.array([0, 0, 1, 1])


def random_hosts(rng, num_ranks, num_experts, more):
    """Each expert on one to `more` + 1 ranks."""
    pairs = [
        (e, g) for e in range(num_experts) for g in rng.choice(num_ranks, rng.integers(1, more + 2), replace=False)
    ]
    order = rng.permutation(len(pairs))
    expert_H, rank_H = np.array(pairs, np.int32)[order].T
    return np.ascontiguousarray(expert_H), np.ascontiguousarray(rank_H)


def least_largest_load(expert_H, rank_H, loads_E, num_ranks):
    """By linear program: variables are the quotas and the target."""
    hosts = len(expert_H)
    served = np.zeros((len(loads_E), hosts + 1))
    served[expert_H, np.arange(hosts)] = 1
    above = np.zeros((num_ranks, hosts + 1))
    above[rank_H, np.arange(hosts)] = 1
    above[:, -1] = -1
    cost = np.eye(hosts + 1)[-1]
    return linprog(cost, A_ub=above, b_ub=np.zeros(num_ranks), A_eq=served, b_eq=loads_E, method="highs").fun


@pytest.mark.parametrize("seed", range(60))
def test_levels_are_the_optimum_of_the_linear_program(seed):
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(2, 12))
    num_experts = int(rng.integers(1, 4)) * num_ranks
    expert_H, rank_H = random_hosts(rng, num_ranks, num_experts, int(rng.integers(0, min(3, num_ranks))))
    loads_E = (rng.pareto(1.0, num_experts) * rng.choice([1, 30, 5000])).astype(np.int64)
    quota_H, target = level_quotas(expert_H, rank_H, loads_E, num_ranks)
    assert quota_H.min() >= 0
    assert np.bincount(expert_H, quota_H, num_experts).tolist() == loads_E.tolist()
    assert np.bincount(rank_H, quota_H, num_ranks).max() == target
    assert target == int(np.ceil(least_largest_load(expert_H, rank_H, loads_E, num_ranks) - 1e-6))


@pytest.mark.parametrize("seed", range(20))
def test_even_splits_are_even_for_every_source_and_in_all(seed):
    rng = np.random.default_rng(seed)
    counts_GE = rng.integers(0, 40, (6, 9))
    expert_H = np.sort(random_hosts(rng, 6, 9, 3)[0])
    copies_H = rng.integers(1, 3, len(expert_H)).astype(np.int32)
    tokens_HG = even_split(expert_H, copies_H, counts_GE)
    for e in range(9):
        mine = expert_H == e
        copies = copies_H[mine].sum()
        np.testing.assert_array_equal(tokens_HG[mine].sum(axis=0), counts_GE[:, e])
        assert (abs(tokens_HG[mine] - counts_GE[:, e] * copies_H[mine, None] / copies) < copies_H[mine, None]).all()
        total_H = tokens_HG[mine].sum(axis=1)
        assert (abs(total_H - counts_GE[:, e].sum() * copies_H[mine] / copies) < copies_H[mine]).all()


def splits(total, parts):
    """All ways to write `total` as a sum of so many whole numbers."""
    for cuts in itertools.combinations_with_replacement(range(total + 1), parts - 1):
        yield np.diff([0, *cuts, total])


def every_split(assignment, counts_GE):
    """(largest load, crossings) of all splits of every node's tokens over the hosts of their experts."""
    hosts_of = [np.flatnonzero(assignment.expert_H == e) for e in range(counts_GE.shape[1])]
    choices = [
        [(node, hosts_of[e], split) for split in splits(int(counts_GE[node == NODE_G, e].sum()), len(hosts_of[e]))]
        for node in (0, 1)
        for e in range(counts_GE.shape[1])
    ]
    for chosen in itertools.product(*choices):
        loads, crossing = np.zeros(4, int), 0
        for node, hosts, split in chosen:
            np.add.at(loads, assignment.rank_H[hosts], split)
            crossing += split[NODE_G[assignment.rank_H[hosts]] != node].sum()
        yield loads.max(), crossing


@pytest.mark.parametrize("seed", range(3))
def test_the_fewest_crossings_are_those_of_all_splits(seed):
    rng = np.random.default_rng(seed)
    expert_H = np.array([0, 1, 2, 3, 0, 1], np.int32)
    rank_H = np.array([0, 1, 2, 3, *rng.permutation([2, 3])], np.int32)
    counts_GE = rng.integers(0, 4, (4, 4))
    assignment = CellHosts(expert_H, rank_H, np.zeros((6, 4), np.int64), np.zeros(6, np.bool_))
    found = list(every_split(assignment, counts_GE))
    least = min(load for load, _ in found)
    for most in (least, least + 2):
        best = min(crossing for load, crossing in found if load <= most)
        assert least_crossing(assignment, counts_GE, NODE_G, most) == pytest.approx(best)


@pytest.mark.parametrize("slots", ["shared", "layer"])
@pytest.mark.parametrize("tolerance", [0.0, 0.02])
def test_a_plan_with_locality_is_at_the_least_and_one_without_is_not(tolerance, slots):
    rng = np.random.default_rng(0)
    counts = rng.poisson(rng.pareto(1.5, (2, 2, 4, 1, 16)).repeat(2, axis=3) * 30).reshape(2, 2, 8, 16)
    near, far = (PlanOptions(tolerance=tolerance, slots=slots, locality=on) for on in (True, False))
    gaps = [cross_node_gap(plan(counts, Topology(8, 2, 2, LINKS), each), counts, tolerance, 4) for each in (near, far)]
    assert -1e-9 <= gaps[0] < 5e-3
    assert gaps[1] > 0.01
