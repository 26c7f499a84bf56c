"""A balancer's placement as a plan that an executor takes: homes in equal numbers on all ranks, slots, fetches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from benchmarks.harness.planner_oracles import CellHosts
from foreroute.plan import StepPlan
from foreroute.plan.counts import counts_digest
from foreroute.plan.hosts import CellPlan, Hosts
from foreroute.simulate.balancers import BalancerInput


def executable(problem: BalancerInput, cells: Sequence[CellPlan]) -> StepPlan:
    """The plan of a step whose hosts stay in all micro-steps. Homes have moved before it begins."""
    num_layers, num_ranks = len(problem.home_LE), problem.topology.num_ranks
    home_LE = np.stack([_homes(cell, num_ranks) for cell in cells[:num_layers]])
    found = [
        _with_home(cell, home_LE[number % num_layers], counts_GE, is_first=number < num_layers)
        for number, (cell, (_, counts_GE)) in enumerate(zip(cells, problem.cells(), strict=True))
    ]
    loads = [cell.loads_G(counts_GE).max() for cell, (_, counts_GE) in zip(found, problem.cells(), strict=True)]
    shape = problem.counts_MLGE.shape[:2]
    least_ML = problem.counts_MLGE.sum(axis=(2, 3)) / num_ranks
    return StepPlan(
        topology=problem.topology,
        previous_home_LE=home_LE,
        hosts=Hosts.of_cells(home_LE, found),
        max_load_ML=np.array(loads, np.int64).reshape(shape),
        bound_ML=least_ML,
        counts_digest=counts_digest(problem.counts_MLGE),
        slots="layer",
    )


def _homes(cell: CellPlan, num_ranks: int) -> NDArray[np.int16]:
    """int16 [E], a host of each expert where there can be one, E / G experts on every rank."""
    num_experts = len(cell.home_E)
    serves_EG = np.zeros((num_experts, num_ranks), np.bool_)
    serves_EG[np.arange(num_experts), cell.home_E] = True
    serves_EG[cell.expert_R, cell.rank_R] = True
    # an expert costs 1 on a rank that does not serve it: the cheapest matching keeps most where they are
    places_EP = np.repeat(~serves_EG, num_experts // num_ranks, axis=1)
    _, place_E = linear_sum_assignment(places_EP)
    home_E: NDArray[np.int16] = (place_E // (num_experts // num_ranks)).astype(np.int16)
    return home_E


def _with_home(
    cell: CellPlan, home_E: NDArray[np.int16], counts_GE: NDArray[np.integer], *, is_first: bool
) -> CellPlan:
    """Make another host of each expert its home; slots are filled by the first cell of a layer."""
    hosts = CellHosts.of(cell, counts_GE)
    expert_H, rank_H = hosts.expert_H, hosts.rank_H
    is_replica_H = rank_H != home_E[expert_H]
    order_R = np.lexsort((rank_H[is_replica_H], expert_H[is_replica_H]))
    expert_R, rank_R = expert_H[is_replica_H][order_R], rank_H[is_replica_H][order_R]
    slot_R = np.empty(len(rank_R), np.int16)
    for rank in np.unique(rank_R):
        slot_R[rank_R == rank] = np.arange((rank_R == rank).sum())
    return CellPlan(
        home_E,
        expert_R.astype(np.int16),
        rank_R.astype(np.int16),
        slot_R,
        np.full(len(slot_R), is_first),
        hosts.tokens_HG[is_replica_H][order_R].astype(np.int32),
    )
