"""Bringing ranks to a target: quota moves between hosts that exist, then replicas are added where that is not enough.

Load can go from rank a to rank b when an expert with quota on a has a host on b. Ranks that a search from an overloaded
rank sees without meeting one below the target are one side of a minimum cut: nothing but another replica helps them.
Searches backward from the ranks below the target say where it could be put: which ranks can take load, or pass it on,
and have a slot.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreroute.kernels import NONE, inlined, next_unit, routine
from foreroute.planner.cell import EXPERT, HELD, NEXT, QUOTA, RANK, CellState, clear, later_use, put, slots_of

REUSE_WEIGHT = 3.0
"""Weight of a future reuse of a replica, relative to one assignment that stays in its node now.
At 0, slots that persist fetch 8 to 34 % more; as said of the values in `replicas`."""


@routine
def grow(cell: CellState, target: int, adding: bool, threshold: float, noise: float) -> int:
    """Bring every rank to the target, or to the least larger one that is found, which is returned.

    A new replica must move the share `threshold` of the most that one can, and chance adds up to the share `noise` of
    this to its score. Without `adding`, the first rank that is stuck above the target ends it.
    """
    # Each round moves load below the target, adds a replica, empties a slot or raises the target. A new replica may
    # lift its rank above the target, where that rank can pass load on; then a later round does. Emptied slots may be
    # filled and emptied again, so their number is bounded (by hand).
    evictions = 2 * len(cell.load_G)
    while True:
        start = heaviest(cell.load_G)
        if cell.load_G[start] <= target:
            return target
        end, count = _search_path(cell, start, target)
        if end != NONE:
            _push(cell, start, end, min(cell.search[end].width, target - cell.load_G[end]))
        elif not adding:
            return int(cell.load_G[start])
        elif _add_replica(cell, start, count, target, threshold, noise):
            continue
        elif evictions > 0 and _evict(cell, count):
            evictions -= 1
        else:
            # The ranks that were seen serve each other's experts alone: the best for them is their mean.
            seen = 0
            for i in range(count):
                seen += cell.load_G[cell.search[i].queue]
            target = -(-seen // count)


@inlined
def _add_replica(cell: CellState, start: int, count: int, target: int, threshold: float, noise: float) -> bool:
    """Add one replica from the seen ranks to another, and use it. What is to be passed on, later searches pass on."""
    capacity = _receiving_capacity(cell, target)
    if capacity == 0:
        return False
    supply, givers = _supply_of(cell, 0, 1), 1  # when the overloaded rank, seen first, has enough, no other has to give
    if supply < capacity:
        supply, givers = max(supply, _supply_of(cell, 1, count)), count
    enough = min(supply, capacity)
    if threshold < 1.0:
        enough = max(int(enough * threshold), 1)
    x, rank = _choose_replica(cell, givers, enough, noise)
    host = _free_slot(cell, rank, cell.hosts[EXPERT, x])
    amount = min(min(cell.search[cell.hosts[RANK, x]].width, cell.hosts[QUOTA, x]), cell.search[rank].back_width)
    if cell.hosts[EXPERT, host] != NONE:
        clear(cell, host)  # it serves nothing
    put(cell, host, cell.hosts[EXPERT, x])
    cell.search[rank].from_host, cell.search[rank].to_host = x, host
    _push(cell, start, rank, amount)
    return True


@inlined
def _choose_replica(cell: CellState, count: int, enough: int, noise: float) -> tuple[int, int]:
    """The host to copy from and the rank to copy to, among those that move enough."""
    best_x, best_rank, best = NONE, NONE, -1.0e30
    for i in range(count):
        rank = cell.search[i].queue
        if cell.search[rank].width < enough:
            continue
        for k in range(cell.host_GK.shape[1]):
            x = cell.host_GK[rank, k]
            if cell.hosts[QUOTA, x] < enough:
                continue
            e = cell.hosts[EXPERT, x]
            for u in range(len(cell.load_G)):
                if cell.search[u].back_width < enough:
                    continue
                # Tokens that come from the rank's node need not cross; a rank with capacity to spare is kept for more,
                # at half the weight (chosen by hand).
                local = min(enough, cell.demand_NE[u // cell.ranks_per_node, e])
                score = local - 0.5 * (cell.search[u].back_width - enough)
                if cell.persistent:
                    score += REUSE_WEIGHT * later_use(cell, e, u)
                if noise > 0.0:
                    score += noise * enough * next_unit(cell.random)
                if score > best:
                    best_x, best_rank, best = x, u, score
    return best_x, best_rank


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
    """Search breadth first from `start` for a rank below the target; return it or NONE, and how many were seen."""
    cell.clock[0] += 1
    now = cell.clock[0]
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
            if x < cell.num_experts and cell.hosts[NEXT, x] == NONE:
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
def _push(cell: CellState, start: int, end: int, amount: int) -> None:
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
def _receiving_capacity(cell: CellState, target: int) -> int:
    """The most that a rank with a free slot can take, or where there is none, take and pass on, in `back_width`."""
    # when no rank has a slot for that either, the answer is 0, and `back_width` says what ranks could take with a slot
    most = 0
    for rank in range(len(cell.load_G)):
        # A rank below the target was not seen by the last search, which would have ended there.
        capacity = target - cell.load_G[rank]
        if capacity > 0 and not _has_free_slot(cell, rank):
            capacity = 0
        cell.search[rank].back_width = max(capacity, 0)
        most = max(most, capacity)
    if most > 0:
        return most
    own, count = _search_back(cell, target)
    for i in range(own, count):
        if _has_free_slot(cell, cell.search[i].back_queue):
            most = max(most, cell.search[cell.search[i].back_queue].back_width)
    if most > 0:
        for i in range(count):
            rank = cell.search[i].back_queue
            if i < own or not _has_free_slot(cell, rank):
                cell.search[rank].back_width = 0
    return most


@inlined
def _search_back(cell: CellState, target: int) -> tuple[int, int]:
    """Search against the edges from all ranks below the target, first in `back_queue`; count them, and all seen."""
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
def _supply_of(cell: CellState, first: int, end: int) -> int:
    """The most that one expert on one of these ranks can give, by their numbers in the last search."""
    most = 0
    for i in range(first, end):
        rank, quota = cell.search[i].queue, 0
        for k in range(cell.host_GK.shape[1]):
            quota = max(quota, cell.hosts[QUOTA, cell.host_GK[rank, k]])
        most = max(most, min(quota, cell.search[rank].width))
    return most


@inlined
def _free_slot(cell: CellState, rank: int, expert: int) -> int:
    """A slot of the rank that serves nothing: the one that holds `expert`, an empty one, the least wanted later."""
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
def _has_free_slot(cell: CellState, rank: int) -> bool:
    """Say whether a slot of the rank serves nothing."""
    found = False
    for x in slots_of(cell, rank):
        found |= cell.hosts[QUOTA, x] == 0
    return found


@inlined
def _evict(cell: CellState, count: int) -> bool:
    """Empty the slot whose place serves best: what a new replica there can take, less what the old one serves."""
    supply, best, best_gain = _supply_of(cell, 0, count), NONE, 0
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
