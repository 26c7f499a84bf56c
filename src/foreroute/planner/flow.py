"""Moving quota between hosts that exist: searches in the residual graph, from load forward and from room backward.

Load can go from rank a to rank b when an expert with quota on a has a host on b. Ranks that a search from an overloaded
rank sees without meeting one below the target are one side of a minimum cut: nothing but another replica helps them.
The searches here then say where such a replica could be put: which ranks can take load, or pass it on, and have a slot.
"""

from __future__ import annotations

from typing import Any

from foreroute.planner.cell import NONE, clear, inlined, later_use, routine


@inlined
def heaviest(load_G: Any) -> Any:
    """The rank with the largest load, the first of several."""
    best = 0
    for g in range(1, len(load_G)):
        if load_G[g] > load_G[best]:
            best = g
    return best


@inlined
def search_path(cell: Any, start: Any, target: Any) -> Any:
    """Breadth first from `start` to a rank below the target.

    Returns:
        The rank, or NONE.
        How many ranks were seen; they are `cell.queue_G[:count]`.
    """
    cell.clock[0] += 1
    now = cell.clock[0]
    num_experts = len(cell.demand_E)
    slots = (len(cell.quota_H) - num_experts) // len(cell.load_G)
    per_rank = cell.home_GK.shape[1]
    cell.seen_G[start] = now
    cell.width_G[start] = cell.load_G[start] - target
    cell.queue_G[0] = start
    # Invariant: queue_G[:count] are the ranks seen, each with what its path from `start` can carry.
    # An expert is looked at once: whatever rank it was found on, it leads to the same ranks.
    count, i = 1, 0
    while i < count:
        rank = cell.queue_G[i]
        i += 1
        for k in range(per_rank + slots):
            if k < per_rank:
                x = cell.home_GK[rank, k]
                if cell.next_H[x] == NONE:  # no replica: its load can go nowhere
                    continue
                e = x
            else:
                x = num_experts + rank * slots + k - per_rank
                e = cell.expert_H[x]
            if cell.quota_H[x] == 0 or cell.seen_E[e] == now:
                continue
            cell.seen_E[e] = now
            y = e
            while y != NONE:
                to = cell.rank_H[y]
                if cell.seen_G[to] != now:
                    cell.seen_G[to] = now
                    cell.from_G[to] = x
                    cell.to_G[to] = y
                    cell.width_G[to] = min(cell.width_G[rank], cell.quota_H[x])
                    if cell.load_G[to] < target:
                        return int(to), count
                    cell.queue_G[count] = to
                    count += 1
                y = cell.next_H[y]
    return NONE, count


@inlined
def push(cell: Any, start: Any, end: Any, amount: Any) -> None:
    """Move load along the path that the last search found."""
    cell.load_G[start] -= amount
    cell.load_G[end] += amount
    # Between both ends what a rank takes it passes on, so its load stays.
    rank = end
    while rank != start:
        x = cell.from_G[rank]
        cell.quota_H[x] -= amount
        cell.quota_H[cell.to_G[rank]] += amount
        rank = cell.rank_H[x]


@inlined
def mean_of_seen(cell: Any, count: Any) -> Any:
    """The mean load of the ranks that the last search saw, rounded up."""
    total = 0
    for i in range(count):
        total += cell.load_G[cell.queue_G[i]]
    return -(-total // count)


@routine
def level(cell: Any, target: Any) -> Any:
    """Bring every rank to the target. False when the present hosts do not allow it."""
    # Each round takes load from a rank above the target to one below, and none rises above it.
    while True:
        start = heaviest(cell.load_G)
        if cell.load_G[start] <= target:
            return True
        end, _ = search_path(cell, start, target)
        if end == NONE:
            return False
        push(cell, start, end, min(cell.width_G[end], target - cell.load_G[end]))


@inlined
def direct_capacity(cell: Any, target: Any) -> Any:
    """The most that a rank with a free slot can take. None of them was seen, for the search would have ended there."""
    most = 0
    for rank in range(len(cell.load_G)):
        capacity = target - cell.load_G[rank]
        if capacity > 0 and free_slot(cell, rank, NONE) == NONE:
            capacity = 0
        cell.back_width_G[rank] = max(capacity, 0)
        most = max(most, capacity)
    return most


@inlined
def chained_capacity(cell: Any, target: Any) -> Any:
    """The most that a rank with a free slot can take and pass on. No rank with capacity has a free slot.

    When there is none, `back_width_G` says what each rank could take or pass on if it had one.
    """
    cell.clock[0] += 1
    now = cell.clock[0]
    count = 0
    for rank in range(len(cell.load_G)):
        if cell.load_G[rank] < target:
            cell.back_width_G[rank] = target - cell.load_G[rank]
            cell.back_queue_G[count] = rank
            cell.seen_G[rank] = now
            count += 1
    # The first `own` ranks have capacity of their own; those behind them can pass load on to one of them.
    own, most = count, 0
    count = _search_back(cell, count)
    for i in range(own, count):
        if free_slot(cell, int(cell.back_queue_G[i]), NONE) != NONE:
            most = max(most, cell.back_width_G[cell.back_queue_G[i]])
    for rank in range(len(cell.load_G)):
        if cell.seen_G[rank] != now:
            cell.back_width_G[rank] = 0
    if most > 0:
        for i in range(count):
            rank = int(cell.back_queue_G[i])
            if i < own or free_slot(cell, rank, NONE) == NONE:
                cell.back_width_G[rank] = 0
    return most


@inlined
def _search_back(cell: Any, count: Any) -> Any:
    """Breadth first against the edges, from the first `count` ranks of `back_queue_G`. Returns its new length."""
    num_experts = len(cell.demand_E)
    per_rank = cell.home_GK.shape[1]
    slots = (len(cell.quota_H) - num_experts) // len(cell.load_G)
    now = cell.clock[0]
    # Invariant: back_width_G of a queued rank can flow from it to a rank below the target over hosts that exist.
    i = 0
    while i < count:
        rank = cell.back_queue_G[i]
        i += 1
        for k in range(per_rank + slots):
            y = cell.home_GK[rank, k] if k < per_rank else num_experts + rank * slots + k - per_rank
            e = cell.expert_H[y]
            if e == NONE or cell.seen_E[e] == now or cell.next_H[e] == NONE:
                continue
            cell.seen_E[e] = now
            x = e
            while x != NONE:
                near = cell.rank_H[x]
                if cell.quota_H[x] > 0 and cell.seen_G[near] != now:
                    cell.seen_G[near] = now
                    cell.back_width_G[near] = min(cell.back_width_G[rank], cell.quota_H[x])
                    cell.back_queue_G[count] = near
                    count += 1
                x = cell.next_H[x]
    return count


@inlined
def supply_of(cell: Any, count: Any) -> Any:
    """The most that one expert on a seen rank can give."""
    num_experts = len(cell.demand_E)
    per_rank = cell.home_GK.shape[1]
    slots = (len(cell.quota_H) - num_experts) // len(cell.load_G)
    most = 0
    for i in range(count):
        rank = cell.queue_G[i]
        quota = 0
        for k in range(per_rank):
            quota = max(quota, cell.quota_H[cell.home_GK[rank, k]])
        for x in range(num_experts + rank * slots, num_experts + (rank + 1) * slots):
            quota = max(quota, cell.quota_H[x])
        most = max(most, min(quota, cell.width_G[rank]))
    return most


@inlined
def free_slot(cell: Any, rank: Any, expert: Any) -> Any:
    """A slot of the rank that serves nothing: the one that holds `expert`, an empty one, or the least wanted later.

    Returns:
        A host, or NONE.
    """
    num_experts = len(cell.demand_E)
    slots = (len(cell.quota_H) - num_experts) // len(cell.load_G)
    # Slots that serve something are never given away here; `evict` does that.
    best, best_worth = NONE, 0.0
    for x in range(num_experts + rank * slots, num_experts + (rank + 1) * slots):
        if cell.quota_H[x] != 0:
            continue
        held = cell.held_H[x]
        if held == expert and held != NONE:
            return x
        # Later use is never negative, so an empty slot goes before any that would lose something.
        worth = -1.0 if held == NONE else later_use(cell, held, rank)
        if best == NONE or worth < best_worth:
            best, best_worth = x, worth
    return best


@inlined
def evict(cell: Any, count: Any) -> Any:
    """Empty the slot whose place serves best: what a new replica there can take, less what the old one serves."""
    num_experts = len(cell.demand_E)
    slots = (len(cell.quota_H) - num_experts) // len(cell.load_G)
    supply = supply_of(cell, count)
    best, best_gain = NONE, 0
    for rank in range(len(cell.load_G)):
        capacity = cell.back_width_G[rank]
        if capacity == 0:
            continue
        for x in range(num_experts + rank * slots, num_experts + (rank + 1) * slots):
            gain = min(supply, capacity + cell.quota_H[x]) - cell.quota_H[x]
            if gain > best_gain:
                best, best_gain = x, gain
    if best == NONE:
        return False
    clear(cell, best)
    return True
