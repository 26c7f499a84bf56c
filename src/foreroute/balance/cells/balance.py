"""From the demand of one cell to replicas and quotas."""

from __future__ import annotations

from typing import Any

from foreroute.balance.cells.copies import grow
from foreroute.balance.cells.flow import reach
from foreroute.balance.cells.kernel import step
from foreroute.balance.cells.state import NONE, clear, recall, relink
from foreroute.balance.splitmix import next_unit

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


@step
def balance(cell: Any, target: Any, tolerant: Any) -> Any:
    """Bring every rank to the target, or as near as is found, with few fetched replicas.

    Returns:
        The target, or the least larger one that was reached.
    """
    reached = _search(cell, target)
    recall(cell)
    if reached == target and tolerant:
        if cell.place[0] == NONE:
            _polish(cell, target)
        else:
            _prune(cell, target)
    return reached


@step
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


@step
def _fetched(cell: Any) -> Any:
    count = 0
    for x in range(len(cell.demand_E), len(cell.expert_H)):
        count += cell.quota_H[x] > 0 and cell.held_H[x] != cell.expert_H[x]
    return count


@step
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
        if reach(cell, target):
            _save(cell)
            least = 0
        else:
            _restore(cell)


@step
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


@step
def _save(cell: Any) -> None:
    for x in range(len(cell.expert_H)):
        cell.quota_best_H[x] = cell.quota_H[x]
        cell.expert_best_H[x] = cell.expert_H[x]


@step
def _restore(cell: Any) -> None:
    for x in range(len(cell.expert_H)):
        cell.quota_H[x] = cell.quota_best_H[x]
        cell.expert_H[x] = cell.expert_best_H[x]
    relink(cell)


@step
def _clear_below(cell: Any, least: Any) -> None:
    """Empty the slots that serve less."""
    for x in range(len(cell.demand_E), len(cell.expert_H)):
        if cell.expert_H[x] != NONE and cell.quota_H[x] < least:
            clear(cell, x)


@step
def _ruin(cell: Any, share: Any) -> None:
    """Empty the slots that serve nothing and a share of the others."""
    for x in range(len(cell.demand_E), len(cell.expert_H)):
        if cell.expert_H[x] != NONE and (cell.quota_H[x] == 0 or next_unit(cell.random) < share):
            clear(cell, x)
