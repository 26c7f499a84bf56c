"""The search for replicas: one call plans a block of micro-steps of some layers, cell by cell in execution order.

A cell is first served at home, then *grown*: a replica is added across each minimum cut until every rank is at the
target. A cell that misses the target is grown again from perturbed states; one that reaches it sheds the replicas that
it can do without. Then its quotas become tokens (`split`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreroute.kernels import next_unit
from foreroute.planner.cell import (
    BEST_EXPERT,
    BEST_QUOTA,
    EXPERT,
    HELD,
    NONE,
    QUOTA,
    RANK,
    begin_cell,
    clear,
    inlined,
    kernel,
    later_use,
    look_ahead,
    put,
    relink,
    restore_held,
    routine,
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

# None of these values is published. They steer a search whose result is checked against the target, so they decide how
# many replicas and how much time it takes, never whether a plan is right. `benchmarks/planner.py` shows both. What is
# said of other values was seen on the workloads G8 and G32, at 3 layers and 16 micro-steps.
REUSE_THRESHOLD = 0.9
"""With slots that persist, replicas that move this share of the most that one can move are weighed by their later use.
At 1, later use breaks ties alone; lower values take more replicas in this cell to spare some in later ones. In steps as
short as these 1 fetched 1 to 18 % less."""
REUSE_WEIGHT = 3.0
"""What an assignment that a replica could serve in later micro-steps counts, by one that stays in its node now.
At 0, slots that persist fetch 8 to 34 % more."""
ATTEMPTS, FEWEST_ATTEMPTS = 1600, 12
"""Most attempts at a cell that misses its target are `ATTEMPTS` / G on G ranks, since each takes longer the more ranks
there are; at least `FEWEST_ATTEMPTS`. With 400, exact cells of 8 ranks and one slot are 1.012 of the mean instead of
1.011, in 40 % of the time."""
PERTURBED_SHARE = 0.3
"""Of the replicas of the best state, those that an attempt takes out. 0.6 does as well."""
THRESHOLD_SPREAD = 0.7
"""An attempt takes replicas that move `1 - THRESHOLD_SPREAD` to 1 of the most that one can move, evenly drawn.
With 0.2 such cells are 1.014 of the mean."""
CHOICE_NOISE = 0.3
"""Of what a replica must move, the most that chance adds to its score in an attempt. With 0 they are 1.014 too."""
THINNING_ROUNDS = 6
"""Attempts at a balanced cell with fewer replicas; each takes half of them out. Without, up to 2 % more are fetched."""


@kernel
def plan_block(
    cell: Any, counts_MLGE: Any, home_LE: Any, held_LH: Any, block: Any, tolerance: Any, persistent: Any, locality: Any
) -> None:
    """Plan the cells of a `Block`, whose arrays are written.

    The state must have planned the micro-steps before of the same layers. Counts are int32 and of the whole step, homes
    int16; `held_LH` int32 [L, H], what slots hold, is read and written when slots are `persistent`.
    """
    row, c = np.int64(0), 0
    end_layer = block.first_layer + block.num_layers
    if persistent and block.begin == 0:
        look_ahead(cell, counts_MLGE, home_LE, block.first_layer, end_layer)
    for m in range(block.begin, block.end):
        for layer in range(block.first_layer, end_layer):
            cell.position[0], cell.position[1] = m if persistent else NONE, layer
            # The stream of a cell depends on nothing else, so that plans do not depend on threads and blocks.
            cell.random[0] = m * counts_MLGE.shape[1] + layer
            counts_GE = counts_MLGE[m, layer]
            total = begin_cell(cell, counts_GE, home_LE[layer], held_LH[layer], persistent)
            target = int(-((-total * (1.0 + tolerance)) // len(cell.load_G)))  # mean and tolerance, rounded up
            reached = find_replicas(cell, target, tolerance > 0.0)
            restore_held(cell)
            if locality:
                keep_local(cell, reached)
            row = split(cell, counts_GE, block, row, locality)
            block.ends_C[c] = row
            block.max_load_C[c] = cell.load_G[heaviest(cell.load_G)]
            c += 1
            if persistent:
                # A slot that serves nothing was not filled: it still holds what it held.
                for x in range(len(cell.demand_E), cell.hosts.shape[1]):
                    if cell.hosts[QUOTA, x]:
                        held_LH[layer, x] = cell.hosts[EXPERT, x]


@routine
def find_replicas(cell: Any, target: Any, tolerant: Any) -> Any:
    """Bring every rank to the target, or as near as is found, with few fetched replicas.

    Returns:
        The target, or the least larger one that was reached.
    """
    reached = _attempt(cell, target)
    restore_held(cell)
    if reached == target and tolerant:
        # Empty slots cost a fetch for every replica, so fewer are searched for; of kept ones only the fetched cost.
        if cell.position[0] == NONE:
            _thin_out(cell, target)
        else:
            _drop_spare(cell, target)
    return reached


@routine
def _thin_out(cell: Any, target: Any) -> None:
    """Take half of the replicas out and add anew, as long as that needs no more of them."""
    _save_best(cell)
    fewest = _fetched(cell)
    for _ in range(THINNING_ROUNDS):
        _perturb(cell, 0.5)
        if grow(cell, target, 1.0, CHOICE_NOISE) <= target and _fetched(cell) <= fewest:
            fewest = _fetched(cell)
            _save_best(cell)
        else:
            _restore_best(cell)


@routine
def _fetched(cell: Any) -> Any:
    """How many replicas serve something and were not in their slot when the cell began."""
    count = 0
    for x in range(len(cell.demand_E), cell.hosts.shape[1]):
        count += cell.hosts[QUOTA, x] > 0 and cell.hosts[HELD, x] != cell.hosts[EXPERT, x]
    return count


@routine
def _drop_spare(cell: Any, target: Any) -> None:
    """Do without the fetched replicas that the others can make up for, those that serve least first."""
    _save_best(cell)
    # The best state always reaches the target. Replicas that serve `least` or less were tried and are needed; after a
    # success all are tried again, for quotas have moved.
    least = 0
    while True:
        host, quota = NONE, 0
        for x in range(len(cell.demand_E), cell.hosts.shape[1]):
            served = cell.hosts[BEST_QUOTA, x]
            if served <= least or cell.hosts[HELD, x] == cell.hosts[BEST_EXPERT, x]:
                continue
            if host == NONE or served < quota:
                host, quota = x, served
        if host == NONE:
            break
        least = quota
        clear(cell, host)
        if level(cell, target):
            _save_best(cell)
            least = 0
        else:
            _restore_best(cell)


@routine
def _attempt(cell: Any, target: Any) -> Any:
    """Grow; where that misses the target, again without replicas in the way, then from perturbed best states."""
    threshold = 1.0 if cell.position[0] == NONE else REUSE_THRESHOLD
    best = grow(cell, target, threshold, 0.0)
    if best <= target:
        return best
    _save_best(cell)
    # The best state is the one with the least target reached; equal ones replace it, so that the search drifts on.
    for attempt in range(max(ATTEMPTS // len(cell.load_G), FEWEST_ATTEMPTS)):
        # replicas with less than a tenth of a rank's load (chosen by hand) take slots that others need
        if attempt == 0:
            _clear_below(cell, target // 10)
        elif attempt == 1:  # from empty slots, but for those that serve more than a rank should
            _clear_below(cell, target + 1)
        else:
            _restore_best(cell)
            _perturb(cell, PERTURBED_SHARE)
            threshold = 1.0 - THRESHOLD_SPREAD * next_unit(cell.random)
        reached = grow(cell, target, threshold, CHOICE_NOISE)
        if reached <= best:
            best = reached
            _save_best(cell)
            if best <= target:
                return best
    _restore_best(cell)
    return best


@routine
def _save_best(cell: Any) -> None:
    for x in range(cell.hosts.shape[1]):
        cell.hosts[BEST_QUOTA, x] = cell.hosts[QUOTA, x]
    for x in range(len(cell.demand_E), cell.hosts.shape[1]):
        cell.hosts[BEST_EXPERT, x] = cell.hosts[EXPERT, x]


@routine
def _restore_best(cell: Any) -> None:
    for x in range(cell.hosts.shape[1]):
        cell.hosts[QUOTA, x] = cell.hosts[BEST_QUOTA, x]
    for x in range(len(cell.demand_E), cell.hosts.shape[1]):
        cell.hosts[EXPERT, x] = cell.hosts[BEST_EXPERT, x]
    relink(cell)


@routine
def _clear_below(cell: Any, least: Any) -> None:
    """Empty the slots that serve less."""
    for x in range(len(cell.demand_E), cell.hosts.shape[1]):
        if cell.hosts[EXPERT, x] != NONE and cell.hosts[QUOTA, x] < least:
            clear(cell, x)


@routine
def _perturb(cell: Any, share: Any) -> None:
    """Empty the slots that serve nothing and a share of the others."""
    for x in range(len(cell.demand_E), cell.hosts.shape[1]):
        if cell.hosts[EXPERT, x] != NONE and (cell.hosts[QUOTA, x] == 0 or next_unit(cell.random) < share):
            clear(cell, x)


@routine
def grow(cell: Any, target: Any, threshold: Any, noise: Any) -> Any:
    """Bring every rank to the target with new replicas, or to the least larger one that is found. Returns it."""
    # Each round moves load below the target, adds a replica, empties a slot or raises the target. A new replica may
    # lift its rank above the target, where that rank can pass load on; then a later round does. Emptied slots may be
    # filled and emptied again, so their number is bounded (by hand).
    evictions = 2 * len(cell.load_G)
    while True:
        start = heaviest(cell.load_G)
        if cell.load_G[start] <= target:
            return target
        end, count = search_path(cell, start, target)
        if end != NONE:
            push(cell, start, end, min(cell.search[end].width, target - cell.load_G[end]))
        elif _add_replica(cell, start, count, target, threshold, noise):
            continue
        elif evictions > 0 and evict(cell, count):
            evictions -= 1
        else:
            # The ranks that were seen serve each other's experts alone: the best for them is their mean.
            target = mean_of_seen(cell, count)


@inlined
def _add_replica(cell: Any, start: Any, count: Any, target: Any, threshold: Any, noise: Any) -> Any:
    """Add one replica from the seen ranks to another, and use it. What is to be passed on, later searches pass on.

    `threshold` is the share of the most that one replica can move which the chosen one must move.
    """
    capacity = direct_capacity(cell, target)
    if capacity == 0:
        capacity = chained_capacity(cell, target)
        if capacity == 0:
            return False
    supply, givers = supply_of(cell, start), 1  # when the overloaded rank has enough, no other has to give
    if supply < capacity:
        givers = count
        for i in range(1, count):
            supply = max(supply, supply_of(cell, cell.search[i].queue))
    enough = min(supply, capacity)
    if threshold < 1.0:
        enough = max(int(enough * threshold), 1)
    x, rank = _choose_replica(cell, givers, enough, noise)
    host = free_slot(cell, rank, cell.hosts[EXPERT, x])
    amount = min(min(cell.search[cell.hosts[RANK, x]].width, cell.hosts[QUOTA, x]), cell.search[rank].back_width)
    if cell.hosts[EXPERT, host] != NONE:
        clear(cell, host)  # it serves nothing
    put(cell, host, cell.hosts[EXPERT, x])
    push(cell, start, cell.hosts[RANK, x], amount)
    cell.hosts[QUOTA, x] -= amount
    cell.hosts[QUOTA, host] += amount
    cell.load_G[cell.hosts[RANK, x]] -= amount
    cell.load_G[rank] += amount
    return True


@inlined
def _choose_replica(cell: Any, count: Any, enough: Any, noise: Any) -> Any:
    """The host to copy from and the rank to copy to, among those that move enough."""
    num_ranks = len(cell.load_G)
    per_node = num_ranks // len(cell.demand_NE)
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
            for u in range(num_ranks):
                if cell.search[u].back_width < enough:
                    continue
                # Tokens that come from the rank's node need not cross; a rank with capacity to spare is kept for more,
                # at half the weight (chosen by hand).
                local = min(enough, cell.demand_NE[u // per_node, e])
                score = local - 0.5 * (cell.search[u].back_width - enough)
                if cell.position[0] >= 0:
                    score += REUSE_WEIGHT * later_use(cell, e, u)
                if noise > 0.0:
                    score += noise * enough * next_unit(cell.random)
                if score > best:
                    best_x, best_rank, best = x, u, score
    return best_x, best_rank
