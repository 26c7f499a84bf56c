"""Replicas that keep tokens on their node, where the cost model says that they pay.

Balancing loads takes few replicas and leaves most tokens crossing nodes, which at 32 ranks and more takes longer than
the experts. Here nodes fetch what their own tokens want most, over the NICs that the rows then leave free. With
deduplicated dispatch one expert more saves little until most picks of a token are local, and then much; so plans are
built as a whole and priced as a whole, never grown replica by replica.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel
from foreroute.costs.pricing import price_cell, slowest_attention
from foreroute.plan.hosts import CellPlan
from foreroute.plan.step_plan import CellHosts
from foreroute.plan.topology import Topology
from foreroute.planner.traffic_kernels import SearchInput, search_cell


def replicate_for_traffic(
    cell: CellPlan,
    counts_GE: NDArray[np.integer],
    topology: Topology,
    costs: CostModel,
    *,
    tolerance: float = 0.02,
) -> CellPlan:
    """Plan a cell anew for short traffic, if that is faster.

    Slots are taken to be empty before the cell and are all refilled, as those shared by layers are.

    Args:
        cell: a plan to beat, with balanced loads.
        counts_GE: integers [G, E], of the cell.
        topology: ranks, links, and as many redundant slots as may be used, which `cell` need not have had.
        costs: the cost model.
        tolerance: the slowest rank should serve at most (1 + tolerance) times the mean.

    Returns:
        A plan that takes less time by the cost model, both stages together, or `cell` itself.
    """
    counts = np.ascontiguousarray(counts_GE, np.int64)
    if topology.num_nodes == 1 or topology.redundant_slots == 0 or not counts.any():
        return cell
    home_E = cell.home_E.astype(np.int64)
    base = CellHosts.of(cell, counts)
    base_s = price_cell(cell, counts, topology, costs).seconds
    # where the plan to beat serves each expert: what the search falls back on if it cannot balance the load by itself
    base_NE = np.zeros((topology.num_nodes, len(home_E)), np.bool_)
    base_NE[topology.node_G[base.rank_H], base.expert_H] = True
    demand_NE = counts.reshape(topology.num_nodes, topology.ranks_per_node, -1).sum(axis=1)
    known = SearchInput(
        counts,
        demand_NE,
        np.argsort(-demand_NE.ravel(), kind="stable"),
        home_E,
        math.ceil((1 + tolerance) * counts.sum() / topology.num_ranks),
        slowest_attention(counts.sum(axis=1), costs),
        costs.prices(topology),
    )
    expert_H, rank_H, tokens_HG = search_cell(known, base_NE, base_s, topology.redundant_slots)
    if not len(expert_H):
        return cell
    return _cell_plan(cell.home_E, expert_H, rank_H, tokens_HG)


def _cell_plan(
    home_E: NDArray[np.int16], expert_H: NDArray[np.int64], rank_H: NDArray[np.int64], tokens_HG: NDArray[np.int64]
) -> CellPlan:
    """The hosts that are no homes, in slots counted from 0 on each rank."""
    replicas = np.flatnonzero(rank_H != home_E[expert_H])
    rank_R = rank_H[replicas]
    # A replica's place in order of rank, less that of the first of its rank, is its slot.
    order = np.argsort(rank_R, kind="stable")
    slot_R = np.empty(len(rank_R), np.int16)
    slot_R[order] = np.arange(len(rank_R)) - np.searchsorted(rank_R[order], rank_R[order])
    return CellPlan(
        home_E,
        expert_H[replicas].astype(np.int16),
        rank_R.astype(np.int16),
        slot_R,
        np.ones(len(replicas), np.bool_),
        tokens_HG[replicas].astype(np.int32),
    )
