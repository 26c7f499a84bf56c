"""Adding replicas across a minimum cut, the one that moves the most load first."""

from __future__ import annotations

from typing import Any

from foreroute.balance.cells.flow import heaviest, mean_of_seen, push, search
from foreroute.balance.cells.future import wanted
from foreroute.balance.cells.kernel import part, step
from foreroute.balance.cells.rooms import chained_room, direct_room, evict, free_slot, supply_of
from foreroute.balance.cells.state import NONE, clear, put
from foreroute.balance.splitmix import next_unit

AHEAD = 3.0
"""What use in later micro-steps counts, by use now."""


@step
def grow(cell: Any, target: Any, theta: Any, noise: Any) -> Any:
    """Bring every rank to the target with new replicas, or to the least larger one that is found. Returns it."""
    evictions = 2 * len(cell.load_G)
    while True:
        start = heaviest(cell.load_G)
        if cell.load_G[start] <= target:
            return target
        end, count = search(cell, start, target)
        if end != NONE:
            push(cell, start, end, min(cell.width_G[end], target - cell.load_G[end]))
        elif _add(cell, start, count, target, theta, noise):
            continue
        elif evictions > 0 and evict(cell, count):
            evictions -= 1
        else:
            target = mean_of_seen(cell, count)


@part
def _add(cell: Any, start: Any, count: Any, target: Any, theta: Any, noise: Any) -> Any:
    """Add one replica from the seen ranks to another, and use it. What is to be passed on, later searches pass on."""
    room = direct_room(cell, target)
    if room == 0:
        room = chained_room(cell, target)
        if room == 0:
            return False
    supply = supply_of(cell, 1)
    if supply < room:
        supply = supply_of(cell, count)
    else:
        count = 1
    enough = min(supply, room)
    if theta < 1.0:
        enough = max(int(enough * theta), 1)
    x, rank = _choose(cell, count, enough, noise)
    host = free_slot(cell, rank, cell.expert_H[x])
    amount = min(min(cell.width_G[cell.rank_H[x]], cell.quota_H[x]), cell.back_width_G[rank])
    if cell.expert_H[host] != NONE:
        clear(cell, host)
    put(cell, host, cell.expert_H[x])
    push(cell, start, cell.rank_H[x], amount)
    cell.quota_H[x] -= amount
    cell.quota_H[host] += amount
    cell.load_G[cell.rank_H[x]] -= amount
    cell.load_G[rank] += amount
    return True


@part
def _choose(cell: Any, count: Any, enough: Any, noise: Any) -> Any:
    """The host to copy from and the rank to copy to, among those that move enough."""
    num_experts = len(cell.demand_E)
    per_rank = cell.home_GK.shape[1]
    num_ranks = len(cell.load_G)
    slots = (len(cell.quota_H) - num_experts) // num_ranks
    per_node = num_ranks // len(cell.demand_NE)
    best_x, best_rank, best = NONE, NONE, -1.0e30
    for i in range(count):
        rank = cell.queue_G[i]
        if cell.width_G[rank] < enough:
            continue
        for k in range(per_rank + slots):
            x = cell.home_GK[rank, k] if k < per_rank else num_experts + rank * slots + k - per_rank
            if cell.quota_H[x] < enough:
                continue
            e = cell.expert_H[x]
            for u in range(num_ranks):
                if cell.back_width_G[u] < enough:
                    continue
                local = min(enough, cell.demand_NE[u // per_node, e])
                score = local - 0.5 * (cell.back_width_G[u] - enough)
                if cell.place[0] >= 0:
                    score += AHEAD * wanted(cell, e, u)
                if noise > 0.0:
                    score += noise * enough * next_unit(cell.random)
                if score > best:
                    best_x, best_rank, best = x, u, score
    return best_x, best_rank
