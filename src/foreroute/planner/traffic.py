"""Replicas that keep tokens on their node, where the cost model says that they pay.

Balancing loads takes few replicas and leaves most tokens crossing nodes, which at 32 ranks and more takes longer than
the experts. The links from host memory idle meanwhile. Here nodes fetch over them what their own tokens want most. With
deduplicated dispatch one expert more saves little until most picks of a token are local, and then much; so plans are
built as a whole and priced as a whole, never grown replica by replica.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.figures import price_cell, slowest_attention
from foreroute.costs.model import CostModel
from foreroute.costs.token_hosts import CellRoutes
from foreroute.errors import PlanError
from foreroute.plan.step_plan import CellHosts, CellPlan, StepPlan
from foreroute.plan.topology import Topology
from foreroute.planner.traffic_kernels import search_cell, split_by_distance


def replicate_for_traffic(
    cell: CellPlan,
    counts_GE: NDArray[np.integer],
    topology: Topology,
    costs: CostModel,
    *,
    tolerance: float = 0.02,
    squares_G: NDArray[np.integer] | None = None,
    routes: CellRoutes | None = None,
) -> CellPlan:
    """Plan a cell anew for short traffic, if that is faster.

    Slots are taken to be empty before the cell and are all refilled, as those shared by layers are.

    Args:
        cell: a plan to beat, with balanced loads.
        counts_GE: integers [G, E], of the cell.
        topology: ranks, links, and as many redundant slots as may be used, which `cell` need not have had.
        costs: the cost model.
        tolerance: the slowest rank should serve at most (1 + tolerance) times the mean.
        squares_G: as in `price_cell`.
        routes: token by token. With them the new plan must also be the faster one on distinct (token, node) pairs as
            they are, not as estimated.

    Returns:
        A plan that takes less time by the cost model, both stages together, or `cell` itself.
    """
    counts = np.ascontiguousarray(counts_GE, np.int64)
    if topology.num_nodes == 1 or topology.redundant_slots == 0 or not counts.any():
        return cell
    home_E = cell.home_E.astype(np.int64)
    base = CellHosts.of(cell, counts)
    base_s = price_cell(base, home_E, topology, costs, squares_G=squares_G).seconds
    # where the plan to beat serves each expert: what the search falls back on if it cannot balance the load by itself
    base_NE = np.zeros((topology.num_nodes, len(home_E)), np.bool_)
    base_NE[topology.node_G[base.rank_H], base.expert_H] = True
    served_GE, _ = search_cell(
        counts,
        home_E,
        base_NE,
        base_s,
        topology.redundant_slots,
        math.ceil((1 + tolerance) * counts.sum() / topology.num_ranks),
        slowest_attention(counts.sum(axis=1), costs, squares_G),
        costs.prices(topology),
    )
    if not served_GE.size:
        return cell
    expert_H, rank_H, _, tokens_HG = split_by_distance(counts, served_GE, home_E, topology.ranks_per_node, False)
    found = _cell_plan(cell.home_E, expert_H, rank_H, tokens_HG)
    if routes is not None:
        pair = (CellHosts.of(found, counts), base)
        new_s, old_s = (
            price_cell(one, home_E, topology, costs, squares_G=squares_G, routes=routes).seconds for one in pair
        )
        return found if new_s < old_s else cell
    return found


def replicate_step(
    plan: StepPlan,
    counts_MLGE: NDArray[np.integer],
    costs: CostModel,
    *,
    tolerance: float = 0.02,
    squares_MG: NDArray[np.integer] | None = None,
    threads: int = 1,
) -> StepPlan:
    """The same for all cells of a step.

    Args:
        plan: with slots that are empty at every cell.
        counts_MLGE: what was planned.
        costs: the cost model.
        tolerance: as in `replicate_for_traffic`.
        squares_MG: [M, G], as in `price_cell`.
        threads: cells are planned on; the answer does not depend on it.

    Raises:
        CountsError: when the counts have another shape than the plan.
        PlanError: when slots keep replicas from micro-step to micro-step.
    """
    plan.require_counts(counts_MLGE)
    if not plan.fetched_R.all():
        raise PlanError(
            f"{int((~plan.fetched_R).sum())} replicas stay in their slots from micro-step to micro-step; plans for "
            "short traffic refill all slots in every cell. Plan with slots='shared'"
        )

    def one(index: tuple[int, int]) -> CellPlan:
        squares_G = None if squares_MG is None else squares_MG[index[0]]
        return replicate_for_traffic(
            plan.cell(*index), counts_MLGE[index], plan.topology, costs, tolerance=tolerance, squares_G=squares_G
        )

    indices = np.ndindex(*plan.shape[:2])
    if threads == 1:
        return plan.with_cells([one(index) for index in indices], counts_MLGE)
    with ThreadPoolExecutor(threads) as pool:
        return plan.with_cells(list(pool.map(one, indices)), counts_MLGE)


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
