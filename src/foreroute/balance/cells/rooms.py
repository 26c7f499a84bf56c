"""Where a new replica could go: slots, what ranks can take, and what could make place."""

from __future__ import annotations

from typing import Any

from foreroute.balance.cells.future import wanted
from foreroute.balance.cells.kernel import part
from foreroute.balance.cells.state import NONE, clear


@part
def direct_room(cell: Any, target: Any) -> Any:
    """The most that a rank with a free slot can take. None of them was seen, for the search would have ended there."""
    most = 0
    for rank in range(len(cell.load_G)):
        room = target - cell.load_G[rank]
        if room > 0 and free_slot(cell, rank, NONE) == NONE:
            room = 0
        cell.back_width_G[rank] = max(room, 0)
        most = max(most, room)
    return most


@part
def chained_room(cell: Any, target: Any) -> Any:
    """The most that a rank with a free slot can take and pass on. No rank with room has a free slot.

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


@part
def _search_back(cell: Any, count: Any) -> Any:
    """Breadth first against the edges, from the first `count` ranks of `back_queue_G`. Returns its new length."""
    num_experts = len(cell.demand_E)
    per_rank = cell.home_GK.shape[1]
    slots = (len(cell.quota_H) - num_experts) // len(cell.load_G)
    now = cell.clock[0]
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


@part
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


@part
def free_slot(cell: Any, rank: Any, expert: Any) -> Any:
    """A slot of the rank that serves nothing: the one that holds `expert`, an empty one, or the least wanted later.

    Returns:
        A host, or NONE.
    """
    num_experts = len(cell.demand_E)
    slots = (len(cell.quota_H) - num_experts) // len(cell.load_G)
    best, best_worth = NONE, 0.0
    for x in range(num_experts + rank * slots, num_experts + (rank + 1) * slots):
        if cell.quota_H[x] != 0:
            continue
        held = cell.held_H[x]
        if held == expert and held != NONE:
            return x
        worth = -1.0 if held == NONE else wanted(cell, held, rank)
        if best == NONE or worth < best_worth:
            best, best_worth = x, worth
    return best


@part
def evict(cell: Any, count: Any) -> Any:
    """Empty the slot whose place serves best: what a new replica there can take, less what the old one serves."""
    num_experts = len(cell.demand_E)
    slots = (len(cell.quota_H) - num_experts) // len(cell.load_G)
    supply = supply_of(cell, count)
    best, best_gain = NONE, 0
    for rank in range(len(cell.load_G)):
        room = cell.back_width_G[rank]
        if room == 0:
            continue
        for x in range(num_experts + rank * slots, num_experts + (rank + 1) * slots):
            gain = min(supply, room + cell.quota_H[x]) - cell.quota_H[x]
            if gain > best_gain:
                best, best_gain = x, gain
    if best == NONE:
        return False
    clear(cell, best)
    return True
