"""LPLB-style: which ranks help each other is fixed, and a linear program says in every cell by how much.

After github.com/deepseek-ai/LPLB, which needs a GPU: experts are ordered by EPLB without copies; each rank has, in its
redundant slots, copies of the heaviest experts of R other ranks, those that a torus or hypercube links it to; per cell
the tokens of the copied experts are divided so that the slowest rank has least. Here the order and the choice of copies
know this step's loads, and the program is solved exactly.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from foreroute.plan.step_plan import CellHosts
from foreroute.planner.balancers.eplb import eplb_placement
from foreroute.planner.balancers.problem import BalancerInput, SlotContents
from foreroute.planner.balancers.splits import level_quotas, split_by_quota

Pairs = tuple[NDArray[np.int32], NDArray[np.int32]]


def lplb_style(problem: BalancerInput) -> Iterator[CellHosts]:
    """Fixed homes and copies, tokens split by the linear program of each cell."""
    hosts_L = [_hosts(loads_E, problem) for loads_E in problem.loads_LE()]
    contents = SlotContents(problem)
    node_G = problem.topology.node_G
    for layer, counts_GE in problem.cells():
        expert_H, rank_H = hosts_L[layer]
        quota_H, _ = level_quotas(expert_H, rank_H, counts_GE.sum(axis=0), len(node_G))
        yield contents.host(layer, expert_H, rank_H, split_by_quota(expert_H, rank_H, quota_H, node_G, counts_GE))


def neighbours(num_ranks: int, degree: int) -> NDArray[np.int64]:
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
        while step in steps:
            step = step % (num_ranks - 1) + 1
        steps.append(step)
    return (rank_G + np.array(steps, np.int64)[:, None]) % num_ranks


def _hosts(loads_E: NDArray[np.int64], problem: BalancerInput) -> Pairs:
    num_ranks, num_experts = problem.topology.num_ranks, problem.num_experts
    per_rank = num_experts // num_ranks
    home_GP = eplb_placement(loads_E, num_experts, 1, 1, num_ranks).reshape(num_ranks, per_rank)
    heaviest = np.argsort(-loads_E[home_GP], axis=1, kind="stable")
    sorted_GP = np.take_along_axis(home_GP, heaviest, axis=1)
    helpers = neighbours(num_ranks, problem.topology.redundant_slots)
    # A rank with fewer experts than neighbours has each of them copied to more than one.
    copied_RG = sorted_GP.T[np.arange(len(helpers)) % per_rank]
    expert_H = np.concatenate([home_GP.reshape(-1), copied_RG.reshape(-1)])
    rank_H = np.concatenate([np.repeat(np.arange(num_ranks), per_rank), helpers.reshape(-1)])
    return expert_H.astype(np.int32), rank_H.astype(np.int32)
