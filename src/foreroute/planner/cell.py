"""The state of one cell while replicas are searched for it, and how the loops that work on it are compiled.

Host e < E is the home of expert e; host E + p is the redundant slot p, which is slot p % S of rank p // S and holds one
expert or none. H = E + G * S hosts. The *quota* of a host is the number of assignments that it serves. Everything is
int32: a cell has fewer than 2**31 assignments.

Invariants between calls: the quotas of an expert's hosts add up to its demand; `load_G` is the sum of the quotas on
each rank; a chain `next_H` from each home visits exactly the slots that hold the expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

import foreroute.kernels

# Kernels make no arrays, they only use those handed in. So they need no reference counts, whose atomic instructions
# took two thirds of the time.
COUNTED = False


def kernel(function: Callable[..., Any]) -> Any:
    """Compile on first use, and keep what is compiled; other threads run meanwhile."""
    return foreroute.kernels.kernel(function, _nrt=COUNTED)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile as a part of each kernel that calls it. A state of thirty arrays is slow to hand over."""
    return njit(nogil=True, _nrt=COUNTED, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def routine(function: Callable[..., Any]) -> Any:
    """Compile once, for kernels that call it rarely or in many places."""
    return njit(nogil=True, _nrt=COUNTED, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


NONE = -1
LOOKAHEAD, LOOKAHEAD_DECAY = 16, 0.9
"""Micro-steps that a replica's use is foreseen, and what each counts by the one before: at the end of the window less
than a fifth (0.9 ** 16 = 0.185). Neither value is published."""


class CellState(NamedTuple):
    """Arrays of one cell, made once and used again for the next. N nodes.

    Attributes:
        home_GK: [G, E / G], the experts at home on each rank.
        demand_E: [E], assignments of each expert.
        demand_NE: [N, E], those of them that come from each node.
        over_NE: [N, E], what the hosts of a replicated expert in a node serve beyond the node's own tokens.
        rank_H: [H].
        expert_H: [H], NONE for an empty slot.
        held_H: [H], what the slots hold when the cell begins; a replica that was held is not fetched.
        quota_H: [H].
        next_H: [H], the next host of the same expert; chains begin at the home.
        load_G: [G], the quotas of each rank.
        width_G, from_G, to_G, seen_G: [G], of the last search: how much can reach the rank, over which pair of hosts,
            and the number of the search that saw it.
        gain_V, before_V: [G + 1], of the search for circles.
        queue_G: [G], the ranks that the last search saw, in order.
        seen_E: [E], the number of the last search that passed the expert.
        clock: [1], the number of the last search; marks of earlier searches are stale without being cleared.
        back_width_G, back_queue_G: the same of the last search backwards.
        quota_best_H, expert_best_H: [H], the best plan found so far.
        demand_MLE: [M, L, E], of all cells, to look ahead.
        surplus_MLG: [M, L, G], what the ranks would serve above the mean if every expert were served at home.
        position: [2], the micro-step and the layer.
        random: [1], state of the random numbers.
        left_G: [G], room for the token split.
    """

    home_GK: Any
    demand_E: Any
    demand_NE: Any
    over_NE: Any
    rank_H: Any
    expert_H: Any
    held_H: Any
    quota_H: Any
    next_H: Any
    load_G: Any
    width_G: Any
    from_G: Any
    to_G: Any
    seen_G: Any
    gain_V: Any
    before_V: Any
    queue_G: Any
    seen_E: Any
    clock: Any
    back_width_G: Any
    back_queue_G: Any
    quota_best_H: Any
    expert_best_H: Any
    demand_MLE: Any
    surplus_MLG: Any
    position: Any
    random: Any
    left_G: Any


def new_cell(num_ranks: int, num_nodes: int, num_experts: int, slots: int, horizon: tuple[int, int]) -> CellState:
    """An empty state for cells of this size."""

    def ints(*shape: int) -> Any:
        return np.zeros(shape, np.int32)

    hosts = num_experts + num_ranks * slots
    arrays: list[Any] = [
        ints(num_ranks, num_experts // num_ranks),
        ints(num_experts),
        ints(num_nodes, num_experts),
        ints(num_nodes, num_experts),
        *(ints(hosts) for _ in range(5)),
        *(ints(num_ranks) for _ in range(5)),
        ints(num_ranks + 1),
        ints(num_ranks + 1),
        ints(num_ranks),
        ints(num_experts),
        ints(1),
        *(ints(num_ranks) for _ in range(2)),
        ints(hosts),
        ints(hosts),
        ints(*horizon, num_experts),
        ints(*horizon, num_ranks),
        ints(2),
        np.ones(1, np.uint64),
        ints(num_ranks),
    ]
    cell = CellState(*arrays)
    cell.rank_H[num_experts:] = np.repeat(np.arange(num_ranks), slots)
    cell.expert_H[:num_experts] = np.arange(num_experts)
    return cell


@routine
def set_homes(cell: Any, home_E: Any) -> None:
    """Take up the homes of a layer."""
    filled_G = cell.queue_G
    filled_G[:] = 0
    for e in range(len(home_E)):
        rank = home_E[e]
        cell.rank_H[e] = rank
        cell.home_GK[rank, filled_G[rank]] = e
        filled_G[rank] += 1


@routine
def set_slots(cell: Any, held_H: Any, kept: Any) -> None:
    """Take up what the slots hold, when they keep it. A second slot of a rank with the same expert offers nothing."""
    num_experts = len(cell.demand_E)
    slots = (len(cell.quota_H) - num_experts) // len(cell.load_G)
    # expert_H is what a slot offers as a host, held_H what it costs nothing to use.
    for x in range(num_experts, len(cell.quota_H)):
        held = held_H[x] if kept else NONE
        cell.held_H[x] = held
        cell.expert_H[x] = held
        for other in range(num_experts + cell.rank_H[x] * slots, x):
            if cell.expert_H[other] == held:
                cell.expert_H[x] = NONE


@routine
def set_demand(cell: Any, counts_GE: Any) -> Any:
    """Add up the counts of a cell. Returns its assignments."""
    num_nodes, num_experts = cell.demand_NE.shape
    per_node = len(counts_GE) // num_nodes
    for n in range(num_nodes):
        for e in range(num_experts):
            cell.demand_NE[n, e] = counts_GE[n * per_node, e]
        for g in range(n * per_node + 1, (n + 1) * per_node):
            for e in range(num_experts):
                cell.demand_NE[n, e] += counts_GE[g, e]
    total = 0
    for e in range(num_experts):
        demand = cell.demand_NE[0, e]
        for n in range(1, num_nodes):
            demand += cell.demand_NE[n, e]
        cell.demand_E[e] = demand
        total += demand
    return total


@routine
def assign_to_homes(cell: Any) -> None:
    """Give every expert to its home. What the slots hold stays linked as hosts without a quota."""
    num_experts = len(cell.demand_E)
    for e in range(num_experts):
        cell.quota_H[e] = cell.demand_E[e]
    for x in range(num_experts, len(cell.quota_H)):
        cell.quota_H[x] = 0
    relink(cell)


@routine
def relink(cell: Any) -> None:
    """Bring chains and loads in line with what the slots hold and with the quotas."""
    num_experts = len(cell.demand_E)
    for g in range(len(cell.load_G)):
        cell.load_G[g] = 0
    for e in range(num_experts):
        cell.load_G[cell.rank_H[e]] += cell.quota_H[e]
        cell.next_H[e] = NONE
    for x in range(num_experts, len(cell.quota_H)):
        e = cell.expert_H[x]
        if e != NONE:
            cell.load_G[cell.rank_H[x]] += cell.quota_H[x]
            cell.next_H[x] = cell.next_H[e]  # behind the home, which stays first
            cell.next_H[e] = x


@inlined
def put(cell: Any, host: Any, expert: Any) -> None:
    """Let an empty slot hold an expert."""
    cell.expert_H[host] = expert
    cell.next_H[host] = cell.next_H[expert]
    cell.next_H[expert] = host


@inlined
def clear(cell: Any, host: Any) -> None:
    """Empty a slot. What it served goes home."""
    expert = cell.expert_H[host]
    quota = cell.quota_H[host]
    if quota:
        cell.quota_H[expert] += quota
        cell.load_G[cell.rank_H[expert]] += quota
        cell.load_G[cell.rank_H[host]] -= quota
        cell.quota_H[host] = 0
    before = expert
    while cell.next_H[before] != host:
        before = cell.next_H[before]
    cell.next_H[before] = cell.next_H[host]
    cell.expert_H[host] = NONE


@routine
def restore_held(cell: Any) -> None:
    """Let slots that serve nothing offer what they held when the cell began, so that quota may move there for free."""
    num_experts = len(cell.demand_E)
    slots = (len(cell.quota_H) - num_experts) // len(cell.load_G)
    for x in range(num_experts, len(cell.quota_H)):
        held = cell.held_H[x]
        if cell.quota_H[x] != 0 or cell.expert_H[x] == held:
            continue
        if cell.expert_H[x] != NONE:
            clear(cell, x)
        # An (expert, rank) pair is one host at most: not where the rank is its home, or another slot serves it.
        first = num_experts + cell.rank_H[x] * slots
        served = held == NONE or cell.rank_H[held] == cell.rank_H[x]
        for other in range(first, first + slots):
            served = served or cell.expert_H[other] == held
        if not served:
            put(cell, x, held)


@routine
def look_ahead(cell: Any, counts_MLGE: Any, home_LE: Any, first_layer: Any, end_layer: Any) -> None:
    """Fill `demand_MLE` and `surplus_MLG` of some layers."""
    num_ranks, num_experts = counts_MLGE.shape[2:]
    for m in range(len(counts_MLGE)):
        for layer in range(first_layer, end_layer):
            for e in range(num_experts):
                cell.demand_MLE[m, layer, e] = 0
            for g in range(num_ranks):
                cell.surplus_MLG[m, layer, g] = 0
                for e in range(num_experts):
                    cell.demand_MLE[m, layer, e] += counts_MLGE[m, layer, g, e]
            total = 0
            for e in range(num_experts):
                total += cell.demand_MLE[m, layer, e]
                cell.surplus_MLG[m, layer, home_LE[layer, e]] += cell.demand_MLE[m, layer, e]
            for g in range(num_ranks):
                cell.surplus_MLG[m, layer, g] -= total // num_ranks


@inlined
def later_use(cell: Any, expert: Any, rank: Any) -> Any:
    """How much a replica could serve in the next micro-steps, sooner ones counting more."""
    m, layer = cell.position[0], cell.position[1]
    home = cell.rank_H[expert]
    worth, weight = 0.0, 1.0
    for later in range(m + 1, min(m + 1 + LOOKAHEAD, len(cell.demand_MLE))):
        weight *= LOOKAHEAD_DECAY
        # As if every expert were served at home: what the home has too much, as far as the rank has too little.
        surplus, room = cell.surplus_MLG[later, layer, home], -cell.surplus_MLG[later, layer, rank]
        if surplus > 0 and room > 0:
            worth += weight * min(cell.demand_MLE[later, layer, expert], min(surplus, room))
    return worth
