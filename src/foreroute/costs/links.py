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
