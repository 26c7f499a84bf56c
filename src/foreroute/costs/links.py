"""The one price of moving bytes: which links carry rows, weights and gradients, and for how long. Compiled (links.hpp).

A rank has five links: its NIC and its link inside the node, one way and the other, and its copy engine, which reads
host memory. A move between ranks of a node goes over the links inside it, one between nodes over NICs, and both ends
are busy for as long. Weights of replicas come from the memory of the node's host where `CostModel.paths` says so; that
memory is shared by the ranks of a node, so weights of another node go over NICs in any case.

Planner, simulator and schedule go by this: `plan.schedule` marks the moves that executors make through host memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import PRICES, Prices
from foreroute.errors import PlanError
from foreroute.kernels import INT, ArrayOf, compiled
from foreroute.plan.hosts import HOSTS, Hosts

CLUSTER_OUT, CLUSTER_IN, NODE_OUT, NODE_IN, HOST = range(5)
"""Columns of arrays over the links of a rank; those over four have no HOST."""


def served_loads(
    hosts: Hosts, counts_MLGE: NDArray[np.integer], ranks_per_node: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Count what hosts do for counts [M, L, G, E]. Raises `PlanError` for hosts of others.

    Returns:
        int64 [M, L, G], assignments that each rank serves; int64 [M, L], those of them that come from another node;
        int64 [M, L], experts whose weights are moved for the cell.
    """
    hosts.require_fit(counts_MLGE)
    num_micro_steps, num_layers, num_ranks, _ = counts_MLGE.shape
    served_MLG = np.zeros((num_micro_steps, num_layers, num_ranks), np.int64)
    crossing_ML, fetches_ML = np.zeros((2, num_micro_steps, num_layers), np.int64)
    _loads(hosts, np.ascontiguousarray(counts_MLGE, np.int32), ranks_per_node, served_MLG, crossing_ML, fetches_ML)
    return served_MLG, crossing_ML, fetches_ML


_loads = compiled(
    "loads_of_cells",
    HOSTS,
    ArrayOf(np.int32, 4),
    INT,
    ArrayOf(np.int64, 3, filled=True),
    ArrayOf(np.int64, 2, filled=True),
    ArrayOf(np.int64, 2, filled=True),
)


def transfer_seconds(
    expert_R: NDArray[np.integer],
    rank_R: NDArray[np.integer],
    fetched_R: NDArray[np.bool_],
    home_E: NDArray[np.integer],
    num_ranks: int,
    prices: Prices,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """float64 [G, 5] twice, seconds of each link for one fetch of the replicas in `fetched_R`, and for all gradients.

    `expert_R` and `rank_R` are integers [R], `home_E` [E]. Replicas at home move nothing.

    Raises `PlanError` for experts and ranks that are not there.
    """
    fetch_G5, gradient_G5 = np.zeros((2, num_ranks, 5))
    expert_R, rank_R, home_E = (np.ascontiguousarray(each, np.int64) for each in (expert_R, rank_R, home_E))
    for what, values, size in (
        ("expert", expert_R, len(home_E)),
        ("rank", rank_R, num_ranks),
        ("home", home_E, num_ranks),
    ):
        if values.min(initial=0) < 0 or values.max(initial=0) >= size:
            raise PlanError(f"{what}s go from {values.min()} to {values.max()}; expected 0 to {size - 1}")
    _transfers(expert_R, rank_R, fetched_R, home_E, prices, fetch_G5, gradient_G5)
    return fetch_G5, gradient_G5


_transfers = compiled(
    "seconds_of_transfers",
    ArrayOf(np.int64, 1),
    ArrayOf(np.int64, 1),
    ArrayOf(np.bool_, 1),
    ArrayOf(np.int64, 1),
    PRICES,
    ArrayOf(np.float64, 2, filled=True),
    ArrayOf(np.float64, 2, filled=True),
)
