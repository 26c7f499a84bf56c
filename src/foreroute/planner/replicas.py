"""The search for replicas: one call plans a block of micro-steps of some layers, cell by cell in execution order.

A cell is first served at home, then *grown*: a replica is added across each minimum cut until every rank is at the
target. A cell that misses the target is grown again from perturbed states; one that reaches it sheds the replicas that
it can do without. Then its quotas become tokens (`split`).
"""

from __future__ import annotations

from typing import Any

from foreroute.kernels import next_unit
from foreroute.planner.cell import (
    NONE,
    clear,
    inlined,
    kernel,
    later_use,
    look_ahead,
    put,
    relink,
    restore_held,
    routine,
    serve_at_home,
    set_demand,
    set_homes,
    set_slots,
)
from foreroute.planner.flow import (
    chained_capacity,
    direct_capacity,
    evict,
    free_slot,
    heaviest,
    level,
    mean_of_seen,
    push,
    search_path,
    supply_of,
)
from foreroute.planner.split import keep_local, split


@kernel
def plan_block(
    cell: Any,
    counts_MLGE: Any,
    home_LE: Any,
    held_LH: Any,
    begin: Any,
    end: Any,
    first_layer: Any,
    end_layer: Any,
    tolerance: Any,
    persistent: Any,
    locality: Any,
    ends_C: Any,
    expert_R: Any,
    rank_R: Any,
    slot_R: Any,
    fetched_R: Any,
    tokens_RG: Any,
    max_load_C: Any,
) -> None:
    """Plan the micro-steps `begin` to `end` of the layers `first_layer` to `end_layer`.

    The state must have planned the micro-steps before of the same layers. Counts are int32 and of the whole step, homes
    int16; `held_LH` int32 [L, H], what slots hold, is read and written when slots are `persistent`. The arrays of a
    `Block` are written.
    """
    row, c = 0, 0
    if persistent and begin == 0:
        look_ahead(cell, counts_MLGE, home_LE, first_layer, end_layer)
    for m in range(begin, end):
        for layer in range(first_layer, end_layer):
            cell.place[0], cell.place[1] = m if persistent else NONE, layer
            cell.random[0] = m * counts_MLGE.shape[1] + layer
            counts_GE = counts_MLGE[m, layer]
            set_homes(cell, home_LE[layer])
            set_slots(cell, held_LH[layer], persistent)
            _plan_cell(cell, set_demand(cell, counts_GE), tolerance, locality)
            row = split(cell, counts_GE, expert_R, rank_R, slot_R, fetched_R, tokens_RG, row, locality)
            ends_C[c] = row
            max_load_C[c] = cell.load_G[heaviest(cell.load_G)]
            c += 1
            if persistent:
                for x in range(len(cell.demand_E), len(cell.expert_H)):
                    if cell.quota_H[x]:
                        held_LH[layer, x] = cell.expert_H[x]


@routine
def _plan_cell(cell: Any, total: Any, tolerance: Any, locality: Any) -> None:
    serve_at_home(cell)
    target = int(-((-total * (1.0 + tolerance)) // len(cell.load_G)))
    reached = find_replicas(cell, target, tolerance > 0.0)
    restore_held(cell)
    if locality:
        keep_local(cell, reached)


THETA = 0.9
"""With slots that persist, replicas that move this share of the most that one can move are weighed by their future."""
TRIES = 1600
"""Most attempts at a cell that misses its target, by the number of ranks: they take longer the more there are."""
RUIN = 0.3
"""The share of replicas that an attempt takes out of the best plan."""
SPREAD = 0.7
"""Attempts take replicas that move this much less than the most that one can move, at times."""
NOISE = 0.3
"""What chance counts in the choice of a replica, by what the replica moves."""
POLISHES = 6
"""Attempts at fewer replicas."""


@routine
def find_replicas(cell: Any, target: Any, tolerant: Any) -> Any:
    """Bring every rank to the target, or as near as is found, with few fetched replicas.

    Returns:
        The target, or the least larger one that was reached.
    """
    reached = _search(cell, target)
    restore_held(cell)
    if reached == target and tolerant:
        if cell.place[0] == NONE:
            _polish(cell, target)
        else:
            _prune(cell, target)
    return reached


@routine
def _polish(cell: Any, target: Any) -> None:
    """Take half of the replicas out and add anew, as long as that needs no more of them."""
    _save(cell)
    fewest = _fetched(cell)
    for _ in range(POLISHES):
        _ruin(cell, 0.5)
        if grow(cell, target, 1.0, NOISE) <= target and _fetched(cell) <= fewest:
            fewest = _fetched(cell)
            _save(cell)
        else:
            _restore(cell)


@routine
def _fetched(cell: Any) -> Any:
    count = 0
    for x in range(len(cell.demand_E), len(cell.expert_H)):
        count += cell.quota_H[x] > 0 and cell.held_H[x] != cell.expert_H[x]
    return count


@routine
def _prune(cell: Any, target: Any) -> None:
    """Do without the fetched replicas that the others can make up for, those that serve least first."""
    _save(cell)
    least = 0
    while True:
        host, quota = NONE, 0
        for x in range(len(cell.demand_E), len(cell.expert_H)):
            served = cell.quota_best_H[x]
            if served <= least or cell.held_H[x] == cell.expert_best_H[x]:
                continue
            if host == NONE or served < quota:
                host, quota = x, served
        if host == NONE:
            break
        least = quota
        clear(cell, host)
        if level(cell, target):
            _save(cell)
            least = 0
        else:
            _restore(cell)


@routine
def _search(cell: Any, target: Any) -> Any:
    """Grow; where that misses the target, try again without the residents in the way, then from ruins of the best."""
    theta = 1.0 if cell.place[0] == NONE else THETA
    best = grow(cell, target, theta, 0.0)
    if best <= target:
        return best
    _save(cell)
    for attempt in range(max(TRIES // len(cell.load_G), 12)):
        if attempt == 0:
            _clear_below(cell, target // 10)
        elif attempt == 1:
            _clear_below(cell, target + 1)
        else:
            _restore(cell)
            _ruin(cell, RUIN)
            theta = 1.0 - SPREAD * next_unit(cell.random)
        reached = grow(cell, target, theta, NOISE)
        if reached <= best:
            best = reached
            _save(cell)
            if best <= target:
                return best
    _restore(cell)
    return best


@routine
def _save(cell: Any) -> None:
    for x in range(len(cell.expert_H)):
        cell.quota_best_H[x] = cell.quota_H[x]
        cell.expert_best_H[x] = cell.expert_H[x]


@routine
def _restore(cell: Any) -> None:
    for x in range(len(cell.expert_H)):
        cell.quota_H[x] = cell.quota_best_H[x]
        cell.expert_H[x] = cell.expert_best_H[x]
    relink(cell)


@routine
def _clear_below(cell: Any, least: Any) -> None:
    """Empty the slots that serve less."""
    for x in range(len(cell.demand_E), len(cell.expert_H)):
        if cell.expert_H[x] != NONE and cell.quota_H[x] < least:
            clear(cell, x)


@routine
def _ruin(cell: Any, share: Any) -> None:
    """Empty the slots that serve nothing and a share of the others."""
    for x in range(len(cell.demand_E), len(cell.expert_H)):
        if cell.expert_H[x] != NONE and (cell.quota_H[x] == 0 or next_unit(cell.random) < share):
            clear(cell, x)


AHEAD = 3.0
"""What use in later micro-steps counts, by use now."""


@routine
def grow(cell: Any, target: Any, theta: Any, noise: Any) -> Any:
    """Bring every rank to the target with new replicas, or to the least larger one that is found. Returns it."""
    evictions = 2 * len(cell.load_G)
    while True:
        start = heaviest(cell.load_G)
        if cell.load_G[start] <= target:
            return target
        end, count = search_path(cell, start, target)
        if end != NONE:
            push(cell, start, end, min(cell.width_G[end], target - cell.load_G[end]))
        elif _add(cell, start, count, target, theta, noise):
            continue
        elif evictions > 0 and evict(cell, count):
            evictions -= 1
        else:
            target = mean_of_seen(cell, count)


@inlined
def _add(cell: Any, start: Any, count: Any, target: Any, theta: Any, noise: Any) -> Any:
    """Add one replica from the seen ranks to another, and use it. What is to be passed on, later searches pass on."""
    room = direct_capacity(cell, target)
    if room == 0:
        room = chained_capacity(cell, target)
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


@inlined
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
                    score += AHEAD * later_use(cell, e, u)
                if noise > 0.0:
                    score += noise * enough * next_unit(cell.random)
                if score > best:
                    best_x, best_rank, best = x, u, score
    return best_x, best_rank
