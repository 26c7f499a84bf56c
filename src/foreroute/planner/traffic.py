"""Replicas that keep tokens on their node, where the cost model says that they pay. Compiled.

Balancing loads takes few replicas and leaves most tokens crossing nodes, which at 32 ranks and more takes longer than
the experts. Here every node first picks, for the slots of all its ranks, the experts that its own tokens want most and
that do not live there. Then nodes serve their own tokens, foreign tokens go to the hosting node with the least to do,
and inside each node experts are laid on ranks, largest first, where they are already if that rank has room, cut where a
rank is full. All amounts are whole assignments.

With deduplicated dispatch one expert more saves little until most picks of a token are local, and then much; so plans
of a cell are built as a whole and priced as a whole, never grown replica by replica.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreroute.costs.model import Prices
from foreroute.costs.pricing import cell_seconds
from foreroute.kernels import NONE, kernel
from foreroute.plan.hosts import CellPlan
from foreroute.planner.split import split_expert

WORTH = 1e-3
"""A plan that saves less than this share of a cell's seconds is not worth its transfers: the cost model is not exact
to a part in a thousand."""
COPIES_LIMITS = (np.inf, 1.25, 0.8)
"""Most replicas of one rank's home experts, by the slots of a rank, that plans are tried with: a home sends all of them
and receives their gradients, over one NIC. On 96 cells of G16 to G64 (two models, 2k and 8k tokens a rank, 4 and 8
slots, copies and dedup) cells take 2.8 % longer with 1.25 alone, 0.6 % without the last, 0.5 % with 2 in its place."""


def most_trials(slots: int) -> int:
    """Plans of a cell that are built and priced at most, the one to beat among them."""
    numbers = 0
    while slots > 0:
        slots, numbers = slots * 3 // 4, numbers + 1
    return 1 + numbers * len(COPIES_LIMITS)


@kernel
def replicate_for_traffic(
    cell: CellPlan,
    counts_GE: Any,
    wanted_NE: Any,
    held_GS: Any,
    keep: float,
    target: int,
    attention_s: Any,
    prices: Prices,
) -> CellPlan:
    """Plan a cell anew for short traffic, if that is faster by the cost model; else it is `cell`, whose loads are even.

    `wanted_NE`, float64 [N, E], says how much the tokens of each node want an expert, in assignments, `keep` by how
    much more one that the node holds in `held_GS`, int16 [G, S], -1 in empty slots. No rank should pass `target`.
    """
    num_ranks, num_experts = counts_GE.shape
    demand_NE = np.zeros(wanted_NE.shape, np.int64)
    for g in range(num_ranks):
        for e in range(num_experts):
            demand_NE[g // prices.ranks_per_node, e] += counts_GE[g, e]
    worth_NE = wanted_NE.copy()
    for g in range(num_ranks):
        for e in held_GS[g]:
            if e != NONE and worth_NE[g // prices.ranks_per_node, e] == wanted_NE[g // prices.ranks_per_node, e]:
                worth_NE[g // prices.ranks_per_node, e] += keep
    order_X = np.argsort(-worth_NE.ravel(), kind="mergesort")  # most wanted first; equal ones keep their order
    found, least_s = cell, cell_seconds(cell, counts_GE, attention_s, prices).sum() * (1 - WORTH)
    for limit in COPIES_LIMITS:
        # as many replicas as fit, then a quarter fewer each time, as long as that takes no more time
        few, last_s = held_GS.shape[1], np.inf
        while few > 0:
            hosted_NE = choose_hosted(wanted_NE, order_X, cell.home_E, prices.ranks_per_node, few, limit * few)
            served_GE = serve_locally(demand_NE, hosted_NE, cell.home_E, held_GS, few, target)
            other = _split(cell.home_E, counts_GE, served_GE, held_GS, worth_NE)
            seconds = cell_seconds(other, counts_GE, attention_s, prices).sum()
            fewer = len(other.expert_R) < len(found.expert_R)
            if seconds < least_s or (fewer and seconds < least_s * (1 + WORTH)):
                found = other
            least_s = min(least_s, seconds)
            if seconds > last_s * (1 + WORTH):
                break
            last_s = min(last_s, seconds)
            few = few * 3 // 4
    return found


@kernel
def choose_hosted(
    wanted_NE: Any, order_X: Any, home_E: Any, ranks_per_node: int, slots: int, most_copies: float
) -> Any:
    """What each node hosts, bool [N, E]: its homes, and what its tokens want most.

    `order_X` are the flat indices of `wanted_NE`, in the order in which they are hosted; at most `most_copies` other
    nodes host the experts of one home rank.
    """
    num_nodes, num_experts = wanted_NE.shape
    # The slots kept back are for parts of experts that are too large for one rank: a slot for each rank but one, and a
    # quarter of all at most (chosen by hand).
    guests = slots * ranks_per_node - min(ranks_per_node - 1, slots * ranks_per_node // 4)
    hosted_NE = np.zeros((num_nodes, num_experts), np.bool_)
    free_N = np.full(num_nodes, guests, np.int64)
    copies_G = np.zeros(num_nodes * ranks_per_node, np.int64)
    for e in range(num_experts):
        hosted_NE[home_E[e] // ranks_per_node, e] = True
    for x in order_X:
        node, e = x // num_experts, x % num_experts
        if wanted_NE[node, e] == 0:
            continue
        if not hosted_NE[node, e] and free_N[node] > 0 and copies_G[home_E[e]] < most_copies:
            hosted_NE[node, e] = True
            free_N[node] -= 1
            copies_G[home_E[e]] += 1
    return hosted_NE


@kernel
def serve_locally(demand_NE: Any, hosted_NE: Any, home_E: Any, held_GS: Any, slots: int, target: int) -> Any:
    """What each rank serves of each expert, int64 [G, E], where nodes host given experts, `hosted_NE`.

    `demand_NE` are assignments of each node's own tokens. No rank takes more than `slots` replicas, nor, where this
    construction finds a way to, more than `target` assignments.
    """
    num_experts, num_ranks = len(home_E), len(held_GS)
    served_GE, load_G = np.zeros((num_ranks, num_experts), np.int64), np.zeros(num_ranks, np.int64)
    holds_GE = np.zeros((num_ranks, num_experts), np.bool_)
    for g in range(num_ranks):
        for e in held_GS[g]:
            if e != NONE:
                holds_GE[g, e] = True
    left_NE = _quotas(demand_NE, hosted_NE)
    for node in range(len(demand_NE)):
        _lay_on_ranks(node, left_NE, home_E, slots, target, holds_GE, served_GE, load_G)
    for e in range(num_experts):
        served_GE[home_E[e], e] += left_NE[:, e].sum()
    return served_GE


@kernel
def _quotas(demand_NE: Any, hosted_NE: Any) -> Any:
    """int64 [N, E], what each node serves of each expert."""
    num_nodes, num_experts = demand_NE.shape
    quota_NE = np.where(hosted_NE, demand_NE, 0)
    load_N = quota_NE.sum(axis=1)
    foreign_E = (demand_NE - quota_NE).sum(axis=0)
    hosts_E = hosted_NE.sum(axis=0)
    # Invariant: load_N is the sum of quota_NE over experts. Experts with one host first: nothing is to be chosen there.
    for flexible in range(2):
        for e in range(num_experts):
            if (hosts_E[e] > 1) != (flexible == 1):
                continue
            while foreign_E[e] > 0:
                first, second = -1, -1
                for node in range(num_nodes):
                    if hosted_NE[node, e]:
                        if first < 0 or load_N[node] < load_N[first]:
                            first, second = node, first
                        elif second < 0 or load_N[node] < load_N[second]:
                            second = node
                amount = foreign_E[e]
                # The emptiest node takes what brings it to the load of the next, so that both are even; where that is
                # little, half of what is left instead, so that an expert ends in few pieces (each a transfer of rows to
                # another node), at most one for each time that its tokens can be halved.
                if second >= 0:
                    amount = min(amount, max(load_N[second] - load_N[first], (amount + 1) // 2))
                quota_NE[first, e] += amount
                load_N[first] += amount
                foreign_E[e] -= amount
    return quota_NE


@kernel
def _lay_on_ranks(
    node: int, left_NE: Any, home_E: Any, slots: int, target: int, holds_GE: Any, served_GE: Any, load_G: Any
) -> None:
    """Lay a node's experts on its ranks. What found no place stays in `left_NE`."""
    left_E, num_experts, ranks_per_node = left_NE[node], len(home_E), len(load_G) // len(left_NE)
    begin, end = node * ranks_per_node, (node + 1) * ranks_per_node
    for e in range(num_experts):
        if begin <= home_E[e] < end:
            served_GE[home_E[e], e] += left_E[e]
            load_G[home_E[e]] += left_E[e]
            left_E[e] = 0
    for rank in range(begin, end):
        # Each turn takes the rank to the target, or all of one expert away from it.
        while load_G[rank] > target:  # cut the largest home expert
            largest = np.argmax(served_GE[rank])
            amount = min(served_GE[rank, largest], load_G[rank] - target)
            served_GE[rank, largest] -= amount
            load_G[rank] -= amount
            left_E[largest] += amount
    # Invariant: no rank that takes a replica is above the target or takes more than `slots`.
    used_G = np.zeros(ranks_per_node, np.int64)
    for e in np.argsort(-left_E):
        while left_E[e] > 0:
            best, least = -1, target
            for rank in range(begin, end):
                free = used_G[rank - begin] < slots and served_GE[rank, e] == 0 and rank != home_E[e]
                # a rank that holds the expert and is not full goes before all others
                load = load_G[rank] - (target if holds_GE[rank, e] and load_G[rank] < target else 0)
                if free and load < least:
                    best, least = rank, load
            if best < 0:
                break
            amount = min(left_E[e], target - load_G[best])
            served_GE[best, e] = amount
            load_G[best] += amount
            used_G[best - begin] += 1
            left_E[e] -= amount


@kernel
def _split(home_E: Any, counts_GE: Any, served_GE: Any, held_GS: Any, worth_NE: Any) -> CellPlan:
    """The plan of a cell whose ranks serve so much of each expert: int64 [G, E].

    What is held stays in its slot. Others take empty slots, then those whose expert is worth least to the node.
    """
    num_ranks, num_experts = counts_GE.shape
    ranks_per_node, most = num_ranks // len(worth_NE), int((served_GE > 0).sum())
    worth_GS = np.full(held_GS.shape, -1.0)
    for g in range(num_ranks):
        for s, e in enumerate(held_GS[g]):
            if e != NONE:
                worth_GS[g, s] = np.inf if served_GE[g, e] > 0 else worth_NE[g // ranks_per_node, e]
    expert_R, rank_R, slot_R = np.empty(most, np.int16), np.empty(most, np.int16), np.empty(most, np.int16)
    fetched_R, tokens_RG = np.empty(most, np.bool_), np.zeros((most, num_ranks), np.int32)
    left_G, home_G, quota_V = np.empty((3, num_ranks), np.int64)
    end = 0
    for e in range(num_experts):
        first, home = end, int(home_E[e])
        for g in range(num_ranks):
            left_G[g] = counts_GE[g, e]
            if served_GE[g, e] > 0 and g != home:
                slot = NONE
                for s in range(held_GS.shape[1]):
                    if held_GS[g, s] == e:
                        slot = s
                fetched_R[end] = slot == NONE
                if slot == NONE:
                    slot = int(np.argmin(worth_GS[g]))
                    worth_GS[g, slot] = np.inf
                expert_R[end], rank_R[end], slot_R[end] = e, g, slot
                quota_V[end - first] = served_GE[g, e]
                end += 1
        if end > first:
            quota = served_GE[home, e]
            split_expert(rank_R, tokens_RG, first, end, quota_V, home, quota, left_G, home_G, ranks_per_node, True)
    return CellPlan(home_E, expert_R[:end], rank_R[:end], slot_R[:end], fetched_R[:end], tokens_RG[:end])
