"""The linear program that locality is measured with, against all splits; and locality against the program."""

import itertools

import numpy as np
import pytest

from benchmarks.harness.planner_oracles import CellHosts, best_split, cross_node_gap, least_crossing
from foreroute.plan import PlanOptions, Topology
from foreroute.planner import plan
from tests.plan.random_plans import LINKS, random_plan
from tests.planner.test_replicas import least_load

NODE_G = np.array([0, 0, 1, 1])


def splits(total, parts):
    """All ways to write `total` as a sum of so many whole numbers."""
    for cuts in itertools.combinations_with_replacement(range(total + 1), parts - 1):
        yield np.diff([0, *cuts, total])


def brute_force(assignment, counts_GE, most):
    """The fewest crossings over all splits of every node's tokens over the hosts of their experts."""
    hosts_of = [np.flatnonzero(assignment.expert_H == e) for e in range(counts_GE.shape[1])]
    choices = [
        [(node, hosts_of[e], split) for split in splits(int(counts_GE[node == NODE_G, e].sum()), len(hosts_of[e]))]
        for node in (0, 1)
        for e in range(counts_GE.shape[1])
    ]
    best = np.inf
    for chosen in itertools.product(*choices):
        loads, crossing = np.zeros(4, int), 0
        for node, hosts, split in chosen:
            np.add.at(loads, assignment.rank_H[hosts], split)
            crossing += split[NODE_G[assignment.rank_H[hosts]] != node].sum()
        if loads.max() <= most:
            best = min(best, crossing)
    return best


@pytest.mark.parametrize("seed", [0, 2, 3, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 4))])
def test_against_all_splits(seed):
    rng = np.random.default_rng(seed)
    expert_H = np.array([0, 1, 2, 3, 0, 1], np.int32)
    rank_H = np.array([0, 1, 2, 3, *rng.permutation([2, 3])], np.int32)
    counts_GE = rng.integers(0, 4, (4, 4))
    assignment = CellHosts(expert_H, rank_H, np.zeros((6, 4), np.int64), np.zeros(6, np.bool_))
    possible = [m for m in range(24) if brute_force(assignment, counts_GE, m) < np.inf]
    for most in (possible[0], possible[0] + 2):
        assert least_crossing(assignment, counts_GE, NODE_G, most) == pytest.approx(
            brute_force(assignment, counts_GE, most)
        )


def test_a_plan_with_locality_is_at_the_least_and_one_without_is_not():
    rng = np.random.default_rng(0)
    counts = rng.poisson(rng.pareto(1.5, (2, 2, 4, 1, 16)).repeat(2, axis=3) * 30).reshape(2, 2, 8, 16)
    topology = Topology(8, 2, 2, LINKS)
    gaps = [cross_node_gap(plan(counts, topology, PlanOptions(locality=on)), counts, 0.02, 4) for on in (True, False)]
    assert 0 <= gaps[0] < 1e-3
    assert gaps[1] > 0.02


@pytest.mark.slow
def test_the_best_split_of_a_plan_is_that_of_each_of_its_cells():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 30, (2, 3, 4, 8))
    topology = Topology(4, 2, 2, LINKS)
    found = random_plan(counts, topology)
    for (m, layer), best in np.ndenumerate(best_split(counts, found)):
        cell, loads_E = found.cell(m, layer), counts[m, layer].sum(axis=0)
        ranks_E = [{int(cell.home_E[e]), *cell.rank_R[cell.expert_R == e].tolist()} for e in range(8)]
        assert best == least_load(loads_E, [sum(1 << g for g in ranks) for ranks in ranks_E], 4)
