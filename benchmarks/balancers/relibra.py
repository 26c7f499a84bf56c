"""ReLibra-style: homes annealed once per step to balance nodes, replicas inside the nodes in every cell.

After ReLibra (arXiv 2605.08639), which knows the routes of a step, as we do: simulated annealing swaps experts between
ranks for a smooth, incrementally updated objective over all micro-steps; then, per cell, a greedy places replicas in
the node and splits tokens together. One buffer of replicas serves all layers, so that it is refilled in every cell.
Here the objective is the sum of squared loads of nodes and ranks, and the final split is the best for the replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.balancers.splits import level_quotas, split_by_quota
from foreroute.kernels import kernel
from foreroute.plan.hosts import CellPlan
from foreroute.simulate.balancers import BalancerInput, HeldExperts

SWAPS = 20_000
"""Proposals per layer."""
HEAT = 1e-2
"""First temperature, as a part of the sum of squared loads of a rank."""


def relibra_style(problem: BalancerInput) -> Iterator[CellPlan]:
    """Homes annealed for the step, node-local replicas by the loads of each cell."""
    num_ranks, node_G = problem.topology.num_ranks, problem.topology.node_G
    loads_MLE = problem.counts_MLGE.sum(axis=2, dtype=np.int64)
    rng = np.random.default_rng(problem.seed)
    home_LE = []
    for layer, before_E in enumerate(problem.home_LE):
        swap_T2, luck_T = rng.integers(problem.num_experts, size=(SWAPS, 2)), rng.random(SWAPS)
        loads_ME = np.ascontiguousarray(loads_MLE[:, layer])
        home_LE.append(anneal_layer(loads_ME, before_E.astype(np.int32), node_G, swap_T2, luck_T))
    held = HeldExperts(problem, rehomes=True)
    for layer, counts_GE in problem.cells():
        home_E: NDArray[np.int32] = home_LE[layer]
        loads_E = counts_GE.sum(axis=0)
        copied_R, rank_R = replicate_in_nodes(loads_E, home_E, node_G, problem.topology.redundant_slots)
        expert_H = np.concatenate([np.arange(len(home_E), dtype=np.int32), copied_R])
        rank_H = np.concatenate([home_E, rank_R])
        quota_H, _ = level_quotas(expert_H, rank_H, loads_E, num_ranks)
        tokens_HG = split_by_quota(expert_H, rank_H, quota_H, problem.topology.ranks_per_node, counts_GE)
        held.clear(layer)
        yield held.host(layer, expert_H, rank_H, tokens_HG)


@kernel
def anneal_layer(loads_ME: Any, home_E: Any, node_G: Any, swap_T2: Any, luck_T: Any) -> Any:
    """int32 [E], homes after simulated annealing; as many experts on each rank as before.

    Args:
        loads_ME: int64 [M, E].
        home_E: int32 [E].
        node_G: int16 [G].
        swap_T2: int64 [T, 2], pairs of experts that may change places.
        luck_T: float64 [T], from 0 to 1, against which a worse placement is accepted.
    """
    num_micro_steps, num_experts = loads_ME.shape
    num_ranks, num_nodes = len(node_G), node_G[-1] + 1
    home_E = home_E.copy()
    weight_EM = np.ascontiguousarray(loads_ME.T).astype(np.float64)
    rank_GM, node_NM = np.zeros((num_ranks, num_micro_steps)), np.zeros((num_nodes, num_micro_steps))
    for e in range(num_experts):
        rank_GM[home_E[e]] += weight_EM[e]
        node_NM[node_G[home_E[e]]] += weight_EM[e]
    heat = (rank_GM * rank_GM).sum() * HEAT / num_ranks
    best, best_E, now = 0.0, home_E.copy(), 0.0
    for step in range(len(luck_T)):
        # falls to nothing with the third power; what is added keeps the division below defined
        temperature = heat * (1.0 - step / len(luck_T)) ** 3 + 1e-9
        x, y = swap_T2[step]
        a, b = home_E[x], home_E[y]
        if a == b:
            continue
        u, v = node_G[a], node_G[b]
        # (a - d)^2 + (b + d)^2 - a^2 - b^2 = 2 d (b - a + d), for the ranks and, if they differ, the nodes of the pair
        change = 0.0
        for m in range(num_micro_steps):
            d = weight_EM[x, m] - weight_EM[y, m]
            change += 2 * d * (rank_GM[b, m] - rank_GM[a, m] + d)
            if u != v:
                change += 2 * d * (node_NM[v, m] - node_NM[u, m] + d)
        if change > 0 and luck_T[step] >= np.exp(-change / temperature):
            continue
        for m in range(num_micro_steps):
            d = weight_EM[x, m] - weight_EM[y, m]
            rank_GM[a, m] -= d
            rank_GM[b, m] += d
            node_NM[u, m] -= d
            node_NM[v, m] += d
        home_E[x], home_E[y] = b, a
        now += change
        if now < best:
            best = now
            best_E[:] = home_E
    return best_E


@kernel
def replicate_in_nodes(loads_E: Any, home_E: Any, node_G: Any, slots: int) -> Any:
    """Replicas inside nodes: int32 [R], their experts, and int32 [R], their ranks.

    The target is the largest mean of a node: no placement that stays in the nodes does better. The heaviest rank gives
    most of an expert that a lighter rank of its node with a free slot can take.

    Args:
        loads_E: int64 [E].
        home_E: int32 [E].
        node_G: int16 [G].
        slots: replicas that a rank can hold.
    """
    num_ranks, num_experts = len(node_G), len(loads_E)
    rest_E, load_G = loads_E.copy(), np.zeros(num_ranks, np.int64)
    node_load, node_size = np.zeros(node_G[-1] + 1, np.int64), np.zeros(node_G[-1] + 1, np.int64)
    for e in range(num_experts):
        load_G[home_E[e]] += loads_E[e]
        node_load[node_G[home_E[e]]] += loads_E[e]
    for g in range(num_ranks):
        node_size[node_G[g]] += 1
    target = ((node_load + node_size - 1) // node_size).max()
    expert_R, rank_R = np.empty(num_ranks * slots, np.int32), np.empty(num_ranks * slots, np.int32)
    hosted_GE, used_G = np.zeros((num_ranks, num_experts), np.bool_), np.zeros(num_ranks, np.int64)
    stuck_G, size = np.zeros(num_ranks, np.bool_), 0
    while True:
        a = -1
        for g in range(num_ranks):
            if not stuck_G[g] and load_G[g] > target and (a < 0 or load_G[g] > load_G[a]):
                a = g
        if a < 0:
            return expert_R[:size].copy(), rank_R[:size].copy()
        most, expert, to = 0, -1, -1
        for b in range(num_ranks):
            if b == a or node_G[b] != node_G[a] or used_G[b] >= slots or load_G[b] >= target:
                continue
            for e in range(num_experts):
                if home_E[e] == a and not hosted_GE[b, e]:
                    amount = min(min(rest_E[e], load_G[a] - target), target - load_G[b])
                    if amount > most:
                        most, expert, to = amount, e, b
        if expert < 0:
            stuck_G[a] = True
            continue
        expert_R[size], rank_R[size] = expert, to
        size += 1
        hosted_GE[to, expert] = True
        used_G[to] += 1
        rest_E[expert] -= most
        load_G[a] -= most
        load_G[to] += most
