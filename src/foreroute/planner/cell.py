"""The state of one cell while replicas are searched for it, and how the loops that work on it are compiled.

Host e < E is the home of expert e; host E + p is the redundant slot p, which is slot p % S of rank p // S and holds one
expert or none. H = E + G * S hosts. The *quota* of a host is the number of assignments that it serves. Numbers
that pass between functions are int64: each further type of an argument compiles a function once more.

Invariants between calls: the quotas of an expert's hosts add up to its demand; `load_G` is the sum of the quotas on
each rank; a chain `next` from each home visits exactly the slots that hold the expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

import foreroute.kernels

# Kernels make no arrays, they only use those handed in. So they need no reference counts, whose atomic instructions
# took two thirds of the time.
COUNTED = False


def kernel(function: Callable[..., Any]) -> Any:
    """Compile on first use, and keep what is compiled; other threads run meanwhile."""
    return foreroute.kernels.kernel(function, _nrt=COUNTED)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile as a part of each kernel that calls it. A state of so many arrays is slow to hand over."""
    return njit(nogil=True, _nrt=COUNTED, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def routine(function: Callable[..., Any]) -> Any:
    """Compile once, for kernels that call it rarely or in many places."""
    return njit(nogil=True, _nrt=COUNTED, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


Ints = NDArray[np.int32]
NONE: Any = np.int64(-1)  # a plain number would be a type of its own, and compiled apart
LOOKAHEAD, LOOKAHEAD_DECAY = 16, 0.9
"""Micro-steps that a replica's use is foreseen, and what each counts by the one before: at the end of the window less
than a fifth (0.9 ** 16 = 0.185). Neither value is published."""

RANK, EXPERT, HELD, QUOTA, NEXT, BEST_EXPERT, BEST_QUOTA = range(7)
"""Rows of `hosts`: a host's rank; its expert, NONE for an empty slot; what a slot holds when the cell begins, which is
not fetched; its quota; the next host of the same expert, NONE behind the last one, chains beginning at the home; expert
and quota in the best plan found so far."""
NOTES = ("seen", "width", "from_host", "to_host", "queue", "back_width", "back_queue", "gain", "before", "left")
VISIT = np.dtype([(name, np.int64) for name in NOTES])
"""What searches note of a rank: the number of the last search that saw it; how much can reach it, over which pair
of hosts; ranks in the order in which they were seen; `back_...`, the same of the last search backwards; the best walk
to it, of the search for circles; room for the token split. Three are used for more: `queue` counts homes while a cell
begins and marks walks in the search for circles, and `width` is what a replica may still take, by row, in the split."""


class CellState(NamedTuple):
    """Arrays of one cell, made once and used again for the next. N nodes, S slots of a rank.

    Few arrays, because each takes seven arguments of every compiled function that the state is handed to. Their rows
    are walked by index: to iterate over them takes longer.

    Attributes:
        hosts: [7, H], see `RANK`.
        host_GK: [G, E / G + S], the hosts on each rank, those at home first.
        slot_GS: [G, S], of them the redundant slots.
        load_G: [G], the quotas of each rank.
        demand_E: [E], assignments of each expert.
        demand_NE: [N, E], those of them that come from each node.
        demand_MLE: [M, L, E], of all cells, to look ahead.
        surplus_MLG: [M, L, G], what the ranks would serve above the mean if every expert were served at home.
        position: [2], the micro-step, NONE when slots are empty at every cell, and the layer.
        random: uint64 [1], state of the random numbers.
        search: VISIT [G + 1], of ranks; the last one is the slack of the search for circles. This and what follows is
            scratch.
        seen_E: [E], the number of the last search that passed the expert.
        clock: [1], the number of the last search; marks of earlier searches are stale without being cleared.
        over_NE: [N, E], what the hosts of a replicated expert in a node serve beyond the node's own tokens.
    """

    hosts: NDArray[np.int64]
    host_GK: NDArray[np.int64]
    slot_GS: NDArray[np.int64]
    load_G: NDArray[np.int64]
    demand_E: Ints
    demand_NE: Ints
    demand_MLE: Ints
    surplus_MLG: Ints
    position: Ints
    random: NDArray[np.uint64]
    search: NDArray[Any]
    seen_E: Ints
    clock: Ints
    over_NE: Ints


def new_cell(num_ranks: int, num_nodes: int, num_experts: int, slots: int, horizon: tuple[int, int]) -> CellState:
    """An empty state for cells of this size."""

    def ints(*shape: int) -> Ints:
        return np.zeros(shape, np.int32)

    num_hosts = num_experts + num_ranks * slots
    slot_GS = np.arange(num_experts, num_hosts).reshape(num_ranks, slots)
    home_GK = np.zeros((num_ranks, num_experts // num_ranks), np.int64)
    cell = CellState(
        hosts=np.zeros((7, num_hosts), np.int64),
        host_GK=np.concatenate([home_GK, slot_GS], axis=1),
        slot_GS=slot_GS,
        load_G=np.zeros(num_ranks, np.int64),
        demand_E=ints(num_experts),
        demand_NE=ints(num_nodes, num_experts),
        demand_MLE=ints(*horizon, num_experts),
        surplus_MLG=ints(*horizon, num_ranks),
        position=ints(2),
        random=np.ones(1, np.uint64),
        search=np.zeros(num_ranks + 1, VISIT).view(np.recarray),  # attributes of its rows without numba too
        seen_E=ints(num_experts),
        clock=ints(1),
        over_NE=ints(num_nodes, num_experts),
    )
    cell.hosts[RANK, num_experts:] = np.repeat(np.arange(num_ranks), slots)
    cell.hosts[EXPERT, :num_experts] = np.arange(num_experts)
    return cell


@routine
def begin_cell(cell: Any, counts_GE: Any, home_E: Any, held_H: Any, kept: Any) -> Any:
    """Take up homes, what slots hold if they keep it, and counts; every expert is served at home.

    Returns:
        The assignments of the cell.
    """
    num_nodes, num_experts = cell.demand_NE.shape
    per_node = len(counts_GE) // num_nodes
    for g in range(len(counts_GE)):
        cell.search[g].queue = 0  # homes of the rank so far
    for n in range(num_nodes):
        for e in range(num_experts):
            cell.demand_NE[n, e] = counts_GE[n * per_node, e]
        for g in range(n * per_node + 1, (n + 1) * per_node):
            for e in range(num_experts):
                cell.demand_NE[n, e] += counts_GE[g, e]
    total = 0
    for e in range(num_experts):
        rank, demand = home_E[e], cell.demand_NE[0, e]
        for n in range(1, num_nodes):
            demand += cell.demand_NE[n, e]
        cell.demand_E[e] = demand
        total += demand
        cell.hosts[RANK, e], cell.hosts[QUOTA, e] = rank, demand
        cell.host_GK[rank, cell.search[rank].queue] = e
        cell.search[rank].queue += 1
    for g in range(len(cell.slot_GS)):
        for s in range(cell.slot_GS.shape[1]):
            x = cell.slot_GS[g, s]
            held = held_H[x] if kept else NONE
            # `expert` is what a slot offers as a host, `held` what it costs nothing to use. A second slot of a rank
            # with the same expert offers nothing.
            cell.hosts[HELD, x], cell.hosts[EXPERT, x], cell.hosts[QUOTA, x] = held, held, 0
            for other in range(cell.slot_GS[g, 0], x):
                if cell.hosts[EXPERT, other] == held:
                    cell.hosts[EXPERT, x] = NONE
    relink(cell)
    return total


@routine
def relink(cell: Any) -> None:
    """Bring chains and loads in line with what the slots hold and with the quotas."""
    num_experts = len(cell.demand_E)
    for g in range(len(cell.load_G)):
        cell.load_G[g] = 0
    for e in range(num_experts):
        cell.load_G[cell.hosts[RANK, e]] += cell.hosts[QUOTA, e]
        cell.hosts[NEXT, e] = NONE
    for x in range(num_experts, cell.hosts.shape[1]):
        e = cell.hosts[EXPERT, x]
        if e != NONE:
            cell.load_G[cell.hosts[RANK, x]] += cell.hosts[QUOTA, x]
            cell.hosts[NEXT, x] = cell.hosts[NEXT, e]  # behind the home, which stays first
            cell.hosts[NEXT, e] = x


@inlined
def put(cell: Any, host: Any, expert: Any) -> None:
    """Let an empty slot hold an expert."""
    cell.hosts[EXPERT, host] = expert
    cell.hosts[NEXT, host] = cell.hosts[NEXT, expert]
    cell.hosts[NEXT, expert] = host


@inlined
def clear(cell: Any, host: Any) -> None:
    """Empty a slot. What it served goes home."""
    expert = cell.hosts[EXPERT, host]
    quota = cell.hosts[QUOTA, host]
    if quota:
        cell.hosts[QUOTA, expert] += quota
        cell.load_G[cell.hosts[RANK, expert]] += quota
        cell.load_G[cell.hosts[RANK, host]] -= quota
        cell.hosts[QUOTA, host] = 0
    before = expert
    while cell.hosts[NEXT, before] != host:
        before = cell.hosts[NEXT, before]
    cell.hosts[NEXT, before] = cell.hosts[NEXT, host]
    cell.hosts[EXPERT, host] = NONE


@routine
def restore_held(cell: Any) -> None:
    """Let slots that serve nothing offer what they held when the cell began, so that quota may move there for free."""
    for x in range(len(cell.demand_E), cell.hosts.shape[1]):
        rank, held = cell.hosts[RANK, x], cell.hosts[HELD, x]
        if cell.hosts[QUOTA, x] != 0 or cell.hosts[EXPERT, x] == held:
            continue
        if cell.hosts[EXPERT, x] != NONE:
            clear(cell, x)
        # An (expert, rank) pair is one host at most: not where the rank is its home, or another slot serves it.
        served = held == NONE or cell.hosts[RANK, held] == rank
        for s in range(cell.slot_GS.shape[1]):
            other = cell.slot_GS[rank, s]
            served = served or cell.hosts[EXPERT, other] == held
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
    home = cell.hosts[RANK, expert]
    worth, weight = 0.0, 1.0
    for later in range(m + 1, min(m + 1 + LOOKAHEAD, len(cell.demand_MLE))):
        weight *= LOOKAHEAD_DECAY
        # As if every expert were served at home: what the home has too much, as far as the rank has too little.
        surplus, room = cell.surplus_MLG[later, layer, home], -cell.surplus_MLG[later, layer, rank]
        if surplus > 0 and room > 0:
            worth += weight * min(cell.demand_MLE[later, layer, expert], min(surplus, room))
    return worth
