"""Dropping replicas whose transfers expose more time than they save, by the cost model. Compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import PRICES, Prices
from foreroute.kernels import ArrayOf, compiled
from foreroute.plan.hosts import CELL_PLAN, CellPlan


def prune_replicas(
    cell: CellPlan, counts_GE: NDArray[np.int32], attention_2: NDArray[np.float64], prices: Prices
) -> CellPlan:
    """Drop replicas of one cell while their transfers expose time; returns a faster plan, or `cell` itself."""
    kept_R, tokens_RG = np.empty(len(cell.expert_R), np.bool_), np.empty_like(cell.tokens_RG)
    now = cell._replace(rank_R=cell.rank_R.copy(), tokens_RG=cell.tokens_RG.copy())
    _prune(now, counts_GE, attention_2, prices, kept_R, tokens_RG)
    return cell if kept_R.all() else cell._replace(tokens_RG=tokens_RG).only(kept_R)


_prune = compiled(
    "prune_replicas",
    CELL_PLAN,
    ArrayOf(np.int32, 2),
    ArrayOf(np.float64, 1),
    PRICES,
    ArrayOf(np.bool_, 1, filled=True),
    ArrayOf(np.int32, 2, filled=True),
)
