"""Moving quota between hosts that exist: searches in the residual graph.

Load can go from rank a to rank b when an expert with quota on a has a host on b. Ranks that a search from an overloaded
rank sees without meeting one below the target are one side of a minimum cut: nothing but another replica helps them.
"""

from __future__ import annotations

from typing import Any

from foreroute.balance.cells.kernel import part, step
from foreroute.balance.cells.state import NONE


@part
def heaviest(load_G: Any) -> Any:
    """The rank with the largest load, the first of several."""
    best = 0
    for g in range(1, len(load_G)):
        if load_G[g] > load_G[best]:
            best = g
    return best


@part
def search(cell: Any, start: Any, target: Any) -> Any:
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
    count, i = 1, 0
    while i < count:
        rank = cell.queue_G[i]
        i += 1
        for k in range(per_rank + slots):
            if k < per_rank:
                x = cell.home_GK[rank, k]
                if cell.next_H[x] == NONE:
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


@part
def push(cell: Any, start: Any, end: Any, amount: Any) -> None:
    """Move load along the path that the last search found."""
    cell.load_G[start] -= amount
    cell.load_G[end] += amount
    rank = end
    while rank != start:
        x = cell.from_G[rank]
        cell.quota_H[x] -= amount
        cell.quota_H[cell.to_G[rank]] += amount
        rank = cell.rank_H[x]


@part
def mean_of_seen(cell: Any, count: Any) -> Any:
    """The mean load of the ranks that the last search saw, rounded up."""
    total = 0
    for i in range(count):
        total += cell.load_G[cell.queue_G[i]]
    return -(-total // count)


@step
def reach(cell: Any, target: Any) -> Any:
    """Bring every rank to the target. False when the present hosts do not allow it."""
    while True:
        start = heaviest(cell.load_G)
        if cell.load_G[start] <= target:
            return True
        end, _ = search(cell, start, target)
        if end == NONE:
            return False
        push(cell, start, end, min(cell.width_G[end], target - cell.load_G[end]))
