"""Splits over given hosts, against linear programs and brute force."""

import numpy as np
import pytest
from scipy.optimize import linprog

from benchmarks.harness.planner_oracles import level_quotas
from foreroute.simulate.eplb import even_split


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
