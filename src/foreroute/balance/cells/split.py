"""Who serves which token: whole numbers of assignments per source rank and host, once the quotas are known."""

from __future__ import annotations

from typing import Any

from foreroute.balance.cells.kernel import part, step
from foreroute.balance.cells.state import NONE


@step
def split(
    cell: Any,
    counts_GE: Any,
    expert_R: Any,
    rank_R: Any,
    slot_R: Any,
    fetched_R: Any,
    tokens_RG: Any,
    row: Any,
    local: Any,
) -> Any:
    """Write the replicas of a cell from `row` on: each host serves its own rank first, then its node, then the rest.

    For given quotas no split keeps more assignments on their rank, nor on their node.

    Returns:
        The row after the last.
    """
    num_experts = len(cell.demand_E)
    num_ranks = len(cell.load_G)
    slots = (len(cell.quota_H) - num_experts) // num_ranks
    for e in range(num_experts):
        if cell.next_H[e] == NONE:
            continue
        first = row
        x = cell.next_H[e]
        while x != NONE:
            if cell.quota_H[x]:
                expert_R[row] = e
                rank_R[row] = cell.rank_H[x]
                slot_R[row] = x - num_experts - cell.rank_H[x] * slots
                fetched_R[row] = cell.held_H[x] != e
                row += 1
            x = cell.next_H[x]
        if row > first:
            _split_expert(cell, counts_GE, e, slots, rank_R, slot_R, tokens_RG, first, row, local)
    return row


@part
def _split_expert(
    cell: Any,
    counts_GE: Any,
    e: Any,
    slots: Any,
    rank_R: Any,
    slot_R: Any,
    tokens_RG: Any,
    first: Any,
    end: Any,
    local: Any,
) -> None:
    """Three rounds over the hosts. What is left after them is the home's."""
    num_experts = len(cell.demand_E)
    num_ranks = len(cell.load_G)
    per_node = num_ranks // len(cell.demand_NE)
    for g in range(num_ranks):
        cell.left_G[g] = counts_GE[g, e]
    home, home_quota = cell.rank_H[e], cell.quota_H[e]
    if local:
        home_quota = _reserve(cell, home, home + 1, home_quota)
    for r in range(first, end):
        rank = rank_R[r]
        quota = cell.quota_H[num_experts + rank * slots + slot_R[r]]
        for g in range(num_ranks):
            tokens_RG[r, g] = 0
        if local:
            quota = _take(cell, tokens_RG, r, rank, rank + 1, quota)
        cell.width_G[r - first] = quota
    if local:
        _reserve(cell, home // per_node * per_node, (home // per_node + 1) * per_node, home_quota)
        for r in range(first, end):
            begin = rank_R[r] // per_node * per_node
            cell.width_G[r - first] = _take(cell, tokens_RG, r, begin, begin + per_node, cell.width_G[r - first])
    for r in range(first, end):
        _take(cell, tokens_RG, r, 0, num_ranks, cell.width_G[r - first])


@part
def _reserve(cell: Any, begin: Any, end: Any, quota: Any) -> Any:
    """Keep tokens of some ranks for the home. Returns the quota that is left."""
    for g in range(begin, end):
        kept = min(cell.left_G[g], quota)
        cell.left_G[g] -= kept
        quota -= kept
    return quota


@part
def _take(cell: Any, tokens_RG: Any, r: Any, begin: Any, end: Any, quota: Any) -> Any:
    for g in range(begin, end):
        if quota == 0:
            break
        take = min(cell.left_G[g], quota)
        tokens_RG[r, g] += take
        cell.left_G[g] -= take
        quota -= take
    return quota
