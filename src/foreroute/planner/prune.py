"""Dropping replicas whose transfers expose more time than they save, by the cost model. Compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreroute.costs.links import HOST, NODE_OUT, pairs_between, transfer_seconds
from foreroute.costs.model import Prices
from foreroute.costs.pricing import EXPOSED, cell_seconds
from foreroute.kernels import NONE, kernel
from foreroute.plan.hosts import CellPlan


@kernel
def prune_replicas(cell: CellPlan, counts_GE: Any, attention_s: Any, prices: Prices) -> CellPlan:
    """Drop replicas of one cell while their transfers expose time; returns a faster plan, or `cell` itself."""
    # One after another goes the replica that serves least of those whose weights or gradients are on the busiest link;
    # another host of its expert takes over. The fastest plan of this series is the answer.
    load_G = pairs_between(cell, counts_GE).sum(axis=0)
    # A replica that is dropped stays in its row, at home, where it serves nothing and moves nothing.
    now = CellPlan(cell.home_E, cell.expert_R, cell.rank_R.copy(), cell.slot_R, cell.fetched_R, cell.tokens_RG.copy())
    kept_R = np.ones(len(cell.expert_R), np.bool_)
    best, best_s = cell, np.inf
    # One replica goes in each round, so there are at most as many rounds as replicas.
    while True:
        parts_SP = cell_seconds(now, counts_GE, attention_s, prices)
        if parts_SP.sum() < best_s:
            best_s = parts_SP.sum()
            best = _rows(now, kept_R) if not kept_R.all() else cell
        if parts_SP[:, EXPOSED].sum() == 0:
            return best
        r = _least_on_busiest(now, len(counts_GE), prices)
        if r == NONE:
            return best
        kept_R[r] = False
        _reassign(now, kept_R, r, load_G)


@kernel
def _rows(cell: CellPlan, kept_R: Any) -> CellPlan:
    """The same cell with these replicas alone."""
    kept = np.flatnonzero(kept_R)
    return CellPlan(
        cell.home_E,
        cell.expert_R[kept],
        cell.rank_R[kept],
        cell.slot_R[kept],
        cell.fetched_R[kept],
        cell.tokens_RG[kept],
    )


@kernel
def _least_on_busiest(cell: CellPlan, num_ranks: int, prices: Prices) -> int:
    """The replica that serves least of those on the busiest link of the step; NONE when nothing moves."""
    fetch_G5, gradient_G5 = transfer_seconds(cell.expert_R, cell.rank_R, cell.fetched_R, cell.home_E, num_ranks, prices)
    # slots that keep what they hold are filled once for each of the two passes
    fetches = len(prices.groups) if prices.refetches else 2
    busy_G5 = fetches * fetch_G5 + gradient_G5
    busiest = np.argmax(busy_G5)
    rank, link = busiest // busy_G5.shape[1], busiest % busy_G5.shape[1]
    best, fewest = NONE, 0
    for r in range(len(cell.expert_R)):
        here, home = cell.rank_R[r], cell.home_E[cell.expert_R[r]]
        if link == HOST:
            involved = cell.fetched_R[r] and here == rank and here // prices.memory_ranks == home // prices.memory_ranks
        else:
            is_near = here // prices.ranks_per_node == home // prices.ranks_per_node
            involved = (here == rank or home == rank) and is_near == (link >= NODE_OUT)
        if here != home and involved and (best == NONE or cell.tokens_RG[r].sum() < fewest):
            best, fewest = r, cell.tokens_RG[r].sum()
    return best


@kernel
def _reassign(cell: CellPlan, kept_R: Any, r: int, load_G: Any) -> None:
    """Let another host of the expert take over what a replica serves: the one on the rank that serves least."""
    taker, rank = NONE, cell.home_E[cell.expert_R[r]]  # the home, which serves what no replica does
    for other in range(len(kept_R)):
        if kept_R[other] and cell.expert_R[other] == cell.expert_R[r] and load_G[cell.rank_R[other]] < load_G[rank]:
            taker, rank = other, cell.rank_R[other]
    for g in range(len(load_G)):
        tokens = cell.tokens_RG[r, g]
        load_G[rank] += tokens
        load_G[cell.rank_R[r]] -= tokens
        if taker != NONE:
            cell.tokens_RG[taker, g] += tokens
        cell.tokens_RG[r, g] = 0
    cell.rank_R[r] = cell.home_E[cell.expert_R[r]]
