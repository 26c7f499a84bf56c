"""LAER-style: in every cell any experts on any rank, chosen by a greedy and scored by communication and compute.

After LAER-MoE (arXiv 2602.11686), whose sharded weights can be rebuilt as any layout: copies by a heap on load per
copy, growing one by one or by whole multiples of the nodes; copies placed from the heaviest down, on the node with
fewest copies of the expert and there on the lightest rank; tokens go evenly to the copies in their node, or evenly to
all where there are none; the layout with the better score is taken. It plans from loads seen before; here it is given
those of the cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import njit

from foreroute.plan.hosts import CellPlan
from foreroute.simulate.balancers import BalancerInput, HeldExperts

COMMUNICATION, COMPUTE = 4, 3
"""Weights of the two terms of the published score."""


def laer_style(problem: BalancerInput) -> Iterator[CellPlan]:
    """Placed anew in every cell by its own loads."""
    held = HeldExperts(problem)
    node_G = problem.topology.node_G.astype(np.int64)
    for layer, counts_GE in problem.cells():
        expert_H, rank_H, tokens_HG = best_layout(counts_GE, node_G, problem.experts_per_rank, crossing(problem))
        yield held.host(layer, expert_H, rank_H, tokens_HG)


def crossing(problem: BalancerInput) -> float:
    """Price sending an assignment to another node in recompute and update, where serving it costs 1."""
    if problem.costs is None:
        return 0.0
    prices = problem.costs.prices(problem.topology)
    serve_s = sum(
        forward * (prices.forward.row_s + prices.forward.pair_s)
        + backward * (prices.backward.row_s + prices.backward.pair_s)
        for _, forward, backward in prices.sweeps
    )
    # serving is priced in seconds, so that crossing becomes a number of assignments
    legs = 2 * sum(forward + backward for _, forward, backward in prices.sweeps)  # a dispatch and a combine each
    return float(legs * prices.cluster_row_s / serve_s)


@njit(cache=True, nogil=True)
def best_layout(counts_GE: Any, node_G: Any, slots: int, crossing: float) -> Any:
    """Hosts and tokens, int32 [H], int32 [H], int64 [H, G], of the better of both ways to grow copies."""
    num_nodes = node_G[-1] + 1
    expert_H, rank_H = _layout(counts_GE, node_G, slots, 1)
    tokens_HG = _nearby_split(expert_H, rank_H, node_G, counts_GE)
    # in one node both ways to grow are the same
    if num_nodes > 1:
        other_expert_H, other_rank_H = _layout(counts_GE, node_G, slots, num_nodes)
        other_HG = _nearby_split(other_expert_H, other_rank_H, node_G, counts_GE)
        if _score(other_rank_H, other_HG, node_G, crossing) < _score(rank_H, tokens_HG, node_G, crossing):
            return other_expert_H, other_rank_H, other_HG
    return expert_H, rank_H, tokens_HG


@njit(cache=True, nogil=True)
def _layout(counts_GE: Any, node_G: Any, slots: int, growth: int) -> Any:
    """Hosts, int32 [H] twice: copies, the heaviest first, each to the node with fewest and its lightest rank."""
    # numbers of copies are multiples of `growth`, where the slots allow it
    num_ranks, num_experts = counts_GE.shape
    loads_E = counts_GE.sum(axis=0)
    copies_E = _copies(loads_E, num_ranks * slots, num_ranks, growth)
    share_E = loads_E / copies_E
    num_nodes = node_G[-1] + 1
    expert_H, rank_H = np.empty(copies_E.sum(), np.int32), np.empty(copies_E.sum(), np.int32)
    load_G, used_G = np.zeros(num_ranks), np.zeros(num_ranks, np.int64)
    hosted_GE, on_node = np.zeros((num_ranks, num_experts), np.bool_), np.zeros((num_nodes, num_experts), np.int64)
    size = 0
    for e in np.argsort(-share_E.astype(np.float32), kind="mergesort"):
        # a copy on a rank that has the expert already would serve nothing
        for _ in range(copies_E[e]):
            best = -1
            for g in range(num_ranks):
                if used_G[g] < slots and not hosted_GE[g, e]:
                    fewer = best < 0 or on_node[node_G[g], e] < on_node[node_G[best], e]
                    same = best >= 0 and on_node[node_G[g], e] == on_node[node_G[best], e]
                    if fewer or (same and load_G[g] < load_G[best]):
                        best = g
            if best >= 0:  # the last ranks with room may host the expert already
                expert_H[size], rank_H[size] = e, best
                size += 1
                load_G[best] += share_E[e]
                used_G[best] += 1
                hosted_GE[best, e] = True
                on_node[node_G[best], e] += 1
    return expert_H[:size], rank_H[:size]


@njit(cache=True, nogil=True)
def _copies(loads_E: Any, room: int, num_ranks: int, growth: int) -> Any:
    """int64 [E], from one to as many as ranks each, `room` together; the largest load per copy grows first."""
    copies_E = np.ones(len(loads_E), np.int64)
    left = room - len(loads_E)
    share_E = loads_E.astype(np.float64)
    while True:
        e = share_E.argmax()
        if share_E[e] <= 0:
            return copies_E
        more = min(growth - copies_E[e] % growth, num_ranks - copies_E[e])
        # an expert that cannot grow any more is out; the others may still fit into what is left
        if more > 0 and more <= left:
            copies_E[e] += more
            left -= more
            share_E[e] = loads_E[e] / copies_E[e]
        else:
            share_E[e] = -1.0


@njit(cache=True, nogil=True)
def by_key(key_H: Any, size: int) -> Any:
    """Hosts in order of an integer key: int64 [size + 1], where those of each key begin, and int64 [H], the hosts."""
    first = np.zeros(size + 1, np.int64)
    for key in key_H:
        first[key + 1] += 1
    first = np.cumsum(first)
    place, host_H = first.copy(), np.empty(len(key_H), np.int64)
    for h in range(len(key_H)):
        host_H[place[key_H[h]]] = h
        place[key_H[h]] += 1
    return first, host_H


@njit(cache=True, nogil=True)
def _nearby_split(expert_H: Any, rank_H: Any, node_G: Any, counts_GE: Any) -> Any:
    """int64 [H, G], evenly over the hosts in the source's node, else evenly over all."""
    num_ranks, num_experts = counts_GE.shape
    first_E, host_H = by_key(expert_H, num_experts)
    tokens_HG = np.zeros((len(expert_H), num_ranks), np.int64)
    turn_H = np.zeros(len(expert_H), np.int64)
    for e in range(num_experts):
        hosts = host_H[first_E[e] : first_E[e + 1]]
        for g in range(num_ranks):
            near = 0
            for h in hosts:
                near += node_G[rank_H[h]] == node_G[g]
            among = near if near > 0 else len(hosts)
            left = counts_GE[g, e] % among
            for h in hosts:
                if near == 0 or node_G[rank_H[h]] == node_G[g]:
                    tokens_HG[h, g] = counts_GE[g, e] // among
            for _ in range(left):  # remainders to the hosts that had fewest of them
                least = -1
                for h in hosts:
                    if (near == 0 or node_G[rank_H[h]] == node_G[g]) and (least < 0 or turn_H[h] < turn_H[least]):
                        least = h
                tokens_HG[least, g] += 1
                turn_H[least] += 1
    return tokens_HG


@njit(cache=True, nogil=True)
def _score(rank_H: Any, tokens_HG: Any, node_G: Any, crossing: float) -> Any:
    """Weigh what crosses nodes at the rank that sends or receives most, and the largest load."""
    num_ranks = len(node_G)
    load_G, in_G, out_G = np.zeros(num_ranks), np.zeros(num_ranks), np.zeros(num_ranks)
    for h in range(len(rank_H)):
        for g in range(num_ranks):
            load_G[rank_H[h]] += tokens_HG[h, g]
            if node_G[rank_H[h]] != node_G[g]:
                in_G[rank_H[h]] += tokens_HG[h, g]
                out_G[g] += tokens_HG[h, g]
    return COMMUNICATION * crossing * max(in_G.max(), out_G.max()) + COMPUTE * load_G.max()
