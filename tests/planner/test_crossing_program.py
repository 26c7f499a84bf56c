"""The linear program that locality is measured with, against all splits; and locality against the program."""

import itertools

import numpy as np
import pytest

from benchmarks.harness.planner_oracles import CellHosts, cross_node_gap, least_crossing
from foreroute.plan import PlanOptions, Topology
from foreroute.planner import plan
from tests.plan.random_plans import LINKS

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


@pytest.mark.parametrize("seed", range(3))
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


@pytest.mark.parametrize("slots", ["shared", "layer"])
@pytest.mark.parametrize("tolerance", [0.0, 0.02])
def test_a_plan_with_locality_is_at_the_least_and_one_without_is_not(tolerance, slots):
    rng = np.random.default_rng(0)
    counts = rng.poisson(rng.pareto(1.5, (2, 2, 4, 1, 16)).repeat(2, axis=3) * 30).reshape(2, 2, 8, 16)
    near, far = (PlanOptions(tolerance=tolerance, slots=slots, locality=on) for on in (True, False))
    gaps = [cross_node_gap(plan(counts, Topology(8, 2, 2, LINKS), each), counts, tolerance, 4) for each in (near, far)]
    assert -1e-9 <= gaps[0] < 5e-3
    assert gaps[1] > 0.01
