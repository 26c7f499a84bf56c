"""The state of one cell while replicas are searched for it.

Host e < E is the home of expert e; host E + p is the redundant slot p, which is slot p % S of rank p // S and holds one
expert or none. H = E + G * S hosts. The *quota* of a host is the number of assignments that it serves. Numbers
that pass between functions are int64: each further type of an argument compiles a function once more.

Invariants between calls: the quotas of an expert's hosts add up to its demand; `load_G` is the sum of the quotas on
each rank; a chain `next` from each home visits exactly the slots that hold the expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.kernels import NONE, inlined, routine

Ints = NDArray[np.int32]
LOOKAHEAD, LOOKAHEAD_DECAY = 16, 0.9
"""Micro-steps that a replica's use is foreseen, and what each counts by the one before: at the end of the window less
than a fifth (0.9 ** 16 = 0.185). Neither value is published."""

RANK, EXPERT, HELD, QUOTA, NEXT, BEST_EXPERT, BEST_QUOTA = range(7)
"""Rows of `hosts`: a host's rank; its expert, NONE for an empty slot; what a slot holds when the cell begins, which is
not fetched; its quota; the next host of the same expert, NONE behind the last one, chains beginning at the home; expert
and quota in the best plan found so far."""
_FIELDS = "seen width from_host to_host queue back_width back_queue gain before waiting"
SEARCH_NODE = np.dtype([(name, np.int64) for name in _FIELDS.split()])
"""Per-rank scratch of the graph searches.

seen: the number of the last search that saw the rank.
width: how much load can reach it, from host `from_host` to host `to_host`, the last edge of the path to it.
queue: at position i, the rank that the search saw as number i.
back_width, back_queue: the same of the last search backwards.
gain, before, waiting: of the search for circles, the best walk to the rank, the node before it on that walk, and
whether the walk has gained since the rank's edges were followed.
"""


class CellState(NamedTuple):
    """Arrays of one cell, made once and used again for the next. N nodes, S slots of a rank.

    Few arrays, because each takes seven arguments of every compiled function that the state is handed to. Their rows
    are walked by index: to iterate over them takes longer.

    Attributes:
        hosts: [7, H], see `RANK`.
        host_GK: [G, E / G + S], the hosts on each rank, those at home first.
        load_G: [G], the quotas of each rank.
        demand_NE: [N, E], assignments of each expert that come from each node.
        demand_MLE, surplus_MLG: of `look_ahead`.
        position: [2], the micro-step and the layer.
        random: uint64 [1], state of the random numbers.
        num_experts: E.
        slots: S.
        ranks_per_node: G / N.
        persistent: whether slots keep what they hold. Otherwise they are empty at every cell.
        search: SEARCH_NODE [G + 1], of ranks; the last one is the slack of the search for circles. This and what
            follows is scratch.
        seen_E: [E], the number of the last search that passed the expert.
        clock: [1], the number of the last search; marks of earlier searches are stale without being cleared.
        over_NE: [N, E], what the hosts of a replicated expert in a node serve beyond the node's own tokens.
        split_3G: [3, G], of one expert: tokens of each rank that have no host yet, those that the home serves, and
            the quotas of its replicas.
    """

    hosts: NDArray[np.int64]
    host_GK: NDArray[np.int64]
    load_G: NDArray[np.int64]
    demand_NE: Ints
    demand_MLE: Ints
    surplus_MLG: Ints
    position: Ints
    random: NDArray[np.uint64]
    num_experts: int
    slots: int
    ranks_per_node: int
    persistent: bool
    search: NDArray[Any]
    seen_E: Ints
    clock: Ints
    over_NE: Ints
    split_3G: Ints


def new_cell(
    num_ranks: int, num_experts: int, slots: int, ranks_per_node: int, later: tuple[Ints, Ints], persistent: bool
) -> CellState:
    """An empty state for cells of this size; `later` is what `look_ahead` gave."""

    def ints(*shape: int) -> Ints:
        return np.zeros(shape, np.int32)

    num_hosts, num_nodes = num_experts + num_ranks * slots, num_ranks // ranks_per_node
    home_GK = np.zeros((num_ranks, num_experts // num_ranks), np.int64)
    slot_GS = np.arange(num_experts, num_hosts).reshape(num_ranks, slots)
    cell = CellState(
        hosts=np.zeros((7, num_hosts), np.int64),
        host_GK=np.concatenate([home_GK, slot_GS], axis=1),
        load_G=np.zeros(num_ranks, np.int64),
        demand_NE=ints(num_nodes, num_experts),
        demand_MLE=later[0],
        surplus_MLG=later[1],
        position=ints(2),
        random=np.ones(1, np.uint64),
        num_experts=num_experts,
        slots=slots,
        ranks_per_node=ranks_per_node,
        persistent=persistent,
        search=np.zeros(num_ranks + 1, SEARCH_NODE).view(np.recarray),  # attributes of its rows without numba too
        seen_E=ints(num_experts),
        clock=ints(1),
        over_NE=ints(num_nodes, num_experts),
        split_3G=ints(3, num_ranks),
    )
    cell.hosts[RANK, num_experts:] = np.repeat(np.arange(num_ranks), slots)
    cell.hosts[EXPERT, :num_experts] = np.arange(num_experts)
    return cell


def look_ahead(counts_MLGE: Ints, home_LE: NDArray[np.int16]) -> tuple[Ints, Ints]:
    """int32 [M, L, E], assignments of each expert, and int32 [M, L, G], what ranks have at home above the mean."""
    demand_MLE = counts_MLGE.sum(axis=2, dtype=np.int32)
    num_micro_steps, num_layers, num_ranks, num_experts = counts_MLGE.shape
    by_rank_MLE = np.take_along_axis(demand_MLE, np.argsort(home_LE, axis=1)[None], axis=2)
    load_MLG = by_rank_MLE.reshape(num_micro_steps, num_layers, num_ranks, num_experts // num_ranks).sum(axis=3)
    return demand_MLE, (load_MLG - load_MLG.sum(axis=2, keepdims=True) // num_ranks).astype(np.int32)


@inlined
def slots_of(cell: CellState, rank: int) -> range:
    """The redundant slots of a rank, as hosts."""
    first = cell.num_experts + rank * cell.slots
    return range(first, first + cell.slots)


@inlined
def all_slots(cell: CellState) -> range:
    """The redundant slots of all ranks, as hosts."""
    return range(cell.num_experts, cell.hosts.shape[1])


@routine
def begin_cell(cell: CellState, counts_GE: Ints, home_E: NDArray[np.int16], held_H: Ints) -> int:
    """Take up homes, what slots hold, and counts, of which the sum is returned; every expert is served at home."""
    num_nodes, num_experts = cell.demand_NE.shape
    for n in range(num_nodes):
        for e in range(num_experts):
            cell.demand_NE[n, e] = 0
    for g in range(len(counts_GE)):
        cell.search[g].queue = 0  # homes of the rank so far
        for e in range(num_experts):
            cell.demand_NE[g // cell.ranks_per_node, e] += counts_GE[g, e]
    total = 0
    for e in range(num_experts):
        rank, demand = home_E[e], 0
        for n in range(num_nodes):
            demand += cell.demand_NE[n, e]
        total += demand
        cell.hosts[RANK, e], cell.hosts[QUOTA, e] = rank, demand
        cell.host_GK[rank, cell.search[rank].queue] = e
        cell.search[rank].queue += 1
    for x in all_slots(cell):
        held = held_H[x]
        # `expert` is what a slot offers as a host, `held` what it costs nothing to use. A second slot of a rank with
        # the same expert offers nothing.
        cell.hosts[HELD, x], cell.hosts[EXPERT, x], cell.hosts[QUOTA, x] = held, held, 0
        for other in slots_of(cell, cell.hosts[RANK, x]):
            if other < x and cell.hosts[EXPERT, other] == held:
                cell.hosts[EXPERT, x] = NONE
    relink(cell)
    return total


@routine
def relink(cell: CellState) -> None:
    """Bring chains and loads in line with what the slots hold and with the quotas."""
    for g in range(len(cell.load_G)):
        cell.load_G[g] = 0
    for e in range(cell.num_experts):
        cell.load_G[cell.hosts[RANK, e]] += cell.hosts[QUOTA, e]
        cell.hosts[NEXT, e] = NONE
    for x in all_slots(cell):
        e = cell.hosts[EXPERT, x]
        if e != NONE:
            cell.load_G[cell.hosts[RANK, x]] += cell.hosts[QUOTA, x]
            cell.hosts[NEXT, x] = cell.hosts[NEXT, e]  # behind the home, which stays first
            cell.hosts[NEXT, e] = x


@inlined
def put(cell: CellState, host: int, expert: int) -> None:
    """Let an empty slot hold an expert."""
    cell.hosts[EXPERT, host] = expert
    cell.hosts[NEXT, host] = cell.hosts[NEXT, expert]
    cell.hosts[NEXT, expert] = host


@inlined
def clear(cell: CellState, host: int) -> None:
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
def restore_held(cell: CellState) -> None:
    """Let slots that serve nothing offer what they held when the cell began, so that quota may move there for free."""
    for x in all_slots(cell):
        rank, held = cell.hosts[RANK, x], cell.hosts[HELD, x]
        if cell.hosts[QUOTA, x] != 0 or cell.hosts[EXPERT, x] == held:
            continue
        if cell.hosts[EXPERT, x] != NONE:
            clear(cell, x)
        # An (expert, rank) pair is one host at most: not where the rank is its home, or another slot serves it.
        served = held == NONE or cell.hosts[RANK, held] == rank
        for other in slots_of(cell, rank):
            served = served or cell.hosts[EXPERT, other] == held
        if not served:
            put(cell, x, held)


@inlined
def later_use(cell: CellState, expert: int, rank: int) -> float:
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
