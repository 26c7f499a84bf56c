"""Moving quota between hosts that exist: searches in the residual graph, from load forward and from room backward.

Load can go from rank a to rank b when an expert with quota on a has a host on b. Ranks that a search from an overloaded
rank sees without meeting one below the target are one side of a minimum cut: nothing but another replica helps them.
The searches here then say where such a replica could be put: which ranks can take load, or pass it on, and have a slot.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreroute.kernels import inlined
from foreroute.planner.cell import EXPERT, HELD, NEXT, NONE, QUOTA, RANK, CellState, clear, later_use, slots_of


@inlined
def level(cell: CellState, target: int) -> tuple[int, int]:
    """Move quota until every rank is at the target.

    Returns:
        A rank above the target whose load can go nowhere over the hosts that exist, or NONE.
        How many ranks its load can reach; they are `queue` of `cell.search[:count]`.
    """
    # Each round takes load from a rank above the target to one below, and none rises above it.
    while True:
        start = heaviest(cell.load_G)
        if cell.load_G[start] <= target:
            return NONE, 0
        end, count = _search_path(cell, start, target)
        if end == NONE:
            return start, count
        push(cell, start, end, min(cell.search[end].width, target - cell.load_G[end]))


@inlined
def heaviest(load_G: NDArray[np.int64]) -> int:
    """The rank with the largest load, the first of several."""
    best = 0
    for g in range(1, len(load_G)):
        if load_G[g] > load_G[best]:
            best = g
    return best


@inlined
def _search_path(cell: CellState, start: int, target: int) -> tuple[int, int]:
    """Breadth first from `start` to a rank below the target.

    Returns:
        The rank, or NONE.
        How many ranks were seen; they are `queue` of `cell.search[:count]`.
    """
    cell.clock[0] += 1
    now, num_experts = cell.clock[0], len(cell.seen_E)
    cell.search[start].seen = now
    cell.search[start].width = cell.load_G[start] - target
    cell.search[0].queue = start
    # Invariant: `queue` of search[:count] are the ranks seen, each with what its path from `start` can carry.
    # An expert is looked at once: whatever rank it was found on, it leads to the same ranks.
    count, i = 1, 0
    while i < count:
        rank = cell.search[i].queue
        i += 1
        for k in range(cell.host_GK.shape[1]):
            x = cell.host_GK[rank, k]
            # a home without a replica: its load can go nowhere
            if x < num_experts and cell.hosts[NEXT, x] == NONE:
                continue
            e = cell.hosts[EXPERT, x]
            if cell.hosts[QUOTA, x] == 0 or cell.seen_E[e] == now:
                continue
            cell.seen_E[e] = now
            y = e
            while y != NONE:
                to = cell.hosts[RANK, y]
                if cell.search[to].seen != now:
                    cell.search[to].seen = now
                    cell.search[to].from_host = x
                    cell.search[to].to_host = y
                    cell.search[to].width = min(cell.search[rank].width, cell.hosts[QUOTA, x])
                    if cell.load_G[to] < target:
                        return to, count
                    cell.search[count].queue = to
                    count += 1
                y = cell.hosts[NEXT, y]
    return NONE, count


@inlined
def push(cell: CellState, start: int, end: int, amount: int) -> None:
    """Move load along the path that the last search found."""
    cell.load_G[start] -= amount
    cell.load_G[end] += amount
    # Between both ends what a rank takes it passes on, so its load stays.
    rank = end
    while rank != start:
        x = cell.search[rank].from_host
        cell.hosts[QUOTA, x] -= amount
        cell.hosts[QUOTA, cell.search[rank].to_host] += amount
        rank = cell.hosts[RANK, x]


@inlined
def receiving_capacity(cell: CellState, target: int) -> int:
    """The most that a rank with a free slot can take, or, when there is none, take and pass on; each in `back_width`.

    When no rank has a slot for that either, the answer is 0, and `back_width` says what ranks could take with a slot.
    """
    most = 0
    for rank in range(len(cell.load_G)):
        # A rank below the target was not seen by the last search, which would have ended there.
        capacity = target - cell.load_G[rank]
        if capacity > 0 and free_slot(cell, rank, NONE) == NONE:
            capacity = 0
        cell.search[rank].back_width = max(capacity, 0)
        most = max(most, capacity)
    if most > 0:
        return most
    own, count = _search_back(cell, target)
    for i in range(own, count):
        if free_slot(cell, cell.search[i].back_queue, NONE) != NONE:
            most = max(most, cell.search[cell.search[i].back_queue].back_width)
    if most > 0:
        for i in range(count):
            rank = cell.search[i].back_queue
            if i < own or free_slot(cell, rank, NONE) == NONE:
                cell.search[rank].back_width = 0
    return most


@inlined
def _search_back(cell: CellState, target: int) -> tuple[int, int]:
    """Breadth first against the edges, from all ranks below the target.

    Returns:
        How many ranks are below the target; they come first in `back_queue`.
        How many can pass load on to one of them, with these.
    """
    cell.clock[0] += 1
    now, count = cell.clock[0], 0
    for rank in range(len(cell.load_G)):
        if cell.load_G[rank] < target:
            cell.search[rank].back_width = target - cell.load_G[rank]
            cell.search[count].back_queue = rank
            cell.search[rank].seen = now
            count += 1
    # Invariant: `back_width` of a queued rank can flow from it to a rank below the target over hosts that exist.
    own, i = count, 0
    while i < count:
        rank = cell.search[i].back_queue
        i += 1
        for k in range(cell.host_GK.shape[1]):
            e = cell.hosts[EXPERT, cell.host_GK[rank, k]]
            if e == NONE or cell.seen_E[e] == now or cell.hosts[NEXT, e] == NONE:
                continue
            cell.seen_E[e] = now
            x = e
            while x != NONE:
                near = cell.hosts[RANK, x]
                if cell.hosts[QUOTA, x] > 0 and cell.search[near].seen != now:
                    cell.search[near].seen = now
                    cell.search[near].back_width = min(cell.search[rank].back_width, cell.hosts[QUOTA, x])
                    cell.search[count].back_queue = near
                    count += 1
                x = cell.hosts[NEXT, x]
    return own, count


@inlined
def supply_of(cell: CellState, count: int) -> int:
    """The most that one expert on one of the first `count` ranks that the last search saw can give."""
    most = 0
    for i in range(count):
        rank = cell.search[i].queue
        for k in range(cell.host_GK.shape[1]):
            most = max(most, min(cell.hosts[QUOTA, cell.host_GK[rank, k]], cell.search[rank].width))
    return most


@inlined
def free_slot(cell: CellState, rank: int, expert: int) -> int:
    """A slot of the rank that serves nothing: the one that holds `expert`, an empty one, or the least wanted later.

    Returns:
        A host, or NONE.
    """
    # Slots that serve something are never given away here; `evict` does that.
    best, best_worth = NONE, 0.0
    for x in slots_of(cell, rank):
        if cell.hosts[QUOTA, x] != 0:
            continue
        held = cell.hosts[HELD, x]
        if held == expert and held != NONE:
            return x
        # Later use is never negative, so an empty slot goes before any that would lose something.
        worth = -1.0 if held == NONE else later_use(cell, held, rank)
        if best == NONE or worth < best_worth:
            best, best_worth = x, worth
    return best


@inlined
def evict(cell: CellState, count: int) -> bool:
    """Empty the slot whose place serves best: what a new replica there can take, less what the old one serves."""
    supply, best, best_gain = supply_of(cell, count), NONE, 0
    for rank in range(len(cell.load_G)):
        capacity = cell.search[rank].back_width
        if capacity == 0:
            continue
        for x in slots_of(cell, rank):
            gain = min(supply, capacity + cell.hosts[QUOTA, x]) - cell.hosts[QUOTA, x]
            if gain > best_gain:
                best, best_gain = x, gain
    if best == NONE:
        return False
    clear(cell, best)
    return True
