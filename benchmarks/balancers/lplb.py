"""Token splits by linear program over placements of EPLB.

LPLB-style is after github.com/deepseek-ai/LPLB, which needs a GPU. Experts are ordered by EPLB without copies. Each
rank has, in its redundant slots, copies of the heaviest experts of R other ranks, those that a torus or hypercube links
it to. Per cell, the tokens of the copied experts are divided so that the slowest rank has least. Here the order and the
choice of copies know this step's loads, and the program is solved exactly.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.balancers.splits import level_quotas, split_by_quota
from foreroute.plan.hosts import CellPlan
from foreroute.simulate.balancers import BalancerInput, HeldExperts
from foreroute.simulate.eplb import eplb_hosts, eplb_placement

Hosts = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Expert and rank of every host."""


def eplb_step_lp(problem: BalancerInput) -> Iterator[CellPlan]:
    """EPLB's placement by the loads of this step; tokens are split as well as those copies allow, in every cell."""
    return _split_by_program(problem, [eplb_hosts(loads_E, problem)[:2] for loads_E in problem.loads_LE()])


def lplb_style(problem: BalancerInput) -> Iterator[CellPlan]:
    """Fixed homes and copies, tokens split by the linear program of each cell."""
    return _split_by_program(problem, [_lplb_hosts(loads_E, problem) for loads_E in problem.loads_LE()])


def _split_by_program(problem: BalancerInput, hosts_L: list[Hosts]) -> Iterator[CellPlan]:
    held = HeldExperts(problem, rehomes=True)
    topology = problem.topology
    for layer, counts_GE in problem.cells():
        expert_H, rank_H = hosts_L[layer]
        quota_H, _ = level_quotas(expert_H, rank_H, counts_GE.sum(axis=0), topology.num_ranks)
        tokens_HG = split_by_quota(expert_H, rank_H, quota_H, topology.ranks_per_node, counts_GE)
        yield held.host(layer, expert_H, rank_H, tokens_HG)


def linked_ranks(num_ranks: int, degree: int) -> NDArray[np.int64]:
    """int64 [degree, G], the ranks that hold the copies of each rank's experts.

    A hypercube where the degree is that of one, else the nearest to a torus of that many dimensions: steps of
    G^(k / degree), k from 0. No rank is its own neighbour, and none is twice.
    """
    rank_G = np.arange(num_ranks)
    if 1 << degree == num_ranks:
        return rank_G ^ (1 << np.arange(degree))[:, None]
    steps: list[int] = []
    for k in range(min(degree, num_ranks - 1)):
        step = max(1, round(num_ranks ** (k / degree)))
        # where rounding gives a step twice, the next free one is taken
        while step in steps:
            step = step % (num_ranks - 1) + 1
        steps.append(step)
    return (rank_G + np.array(steps, np.int64)[:, None]) % num_ranks


def _lplb_hosts(loads_E: NDArray[np.int64], problem: BalancerInput) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    num_ranks, num_experts = problem.topology.num_ranks, problem.num_experts
    per_rank = num_experts // num_ranks
    home_GP = eplb_placement(loads_E, num_experts, num_ranks).reshape(num_ranks, per_rank)
    heaviest = np.argsort(-loads_E[home_GP], axis=1, kind="stable")
    sorted_GP = np.take_along_axis(home_GP, heaviest, axis=1)
    helpers = linked_ranks(num_ranks, problem.topology.redundant_slots)
    # a rank with fewer experts than linked ranks has each of them copied to more than one.
    copied_RG = sorted_GP.T[np.arange(len(helpers)) % per_rank]
    expert_H = np.concatenate([home_GP.reshape(-1), copied_RG.reshape(-1)])
    rank_H = np.concatenate([np.repeat(np.arange(num_ranks), per_rank), helpers.reshape(-1)])
    return expert_H.astype(np.int32), rank_H.astype(np.int32)
