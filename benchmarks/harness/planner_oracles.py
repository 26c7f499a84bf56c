"""The best that the replicas of a plan allow: loads by maximum flow, and traffic by linear program."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.balancers.splits import level_quotas
from foreroute.plan import CellPlan, StepPlan


@dataclass(frozen=True, eq=False)
class CellHosts:
    """All hosts of all experts in one cell, homes among them: for those that count anew what a plan says.

    Attributes:
        expert_H: int32 [H].
        rank_H: int32 [H].
        tokens_HG: int64 [H, G], assignments of source rank g to this expert that this host serves. Over the hosts of
            an expert they add up to the cell's counts.
        fetched_H: bool [H], the weights must be moved to this rank before the cell.
    """

    expert_H: NDArray[np.int32]
    rank_H: NDArray[np.int32]
    tokens_HG: NDArray[np.int64]
    fetched_H: NDArray[np.bool_]

    @classmethod
    def of(cls, cell: CellPlan, counts_GE: NDArray[np.integer]) -> CellHosts:
        """Homes and replicas of a planned cell."""
        num_experts = len(cell.home_E)
        return cls(
            np.concatenate([np.arange(num_experts), cell.expert_R]).astype(np.int32),
            np.concatenate([cell.home_E, cell.rank_R]).astype(np.int32),
            np.concatenate([cell.home_tokens_GE(counts_GE).T, cell.tokens_RG]),
            np.concatenate([np.zeros(num_experts, np.bool_), cell.fetched_R]),
        )

    @property
    def loads_G(self) -> NDArray[np.int64]:
        """int64 [G], assignments that each rank serves."""
        loads_G = np.zeros(self.tokens_HG.shape[1], np.int64)
        np.add.at(loads_G, self.rank_H, self.tokens_HG.sum(axis=1))
        return loads_G


def best_split(counts_MLGE: NDArray[np.integer], plan: StepPlan) -> NDArray[np.int64]:
    """The least `max_load_ML` that the homes and replicas of a plan allow, however tokens are split. int64 [M, L]."""
    least_ML = np.empty(plan.shape[:2], np.int64)
    for m, layer in np.ndindex(*plan.shape[:2]):
        hosts = CellHosts.of(plan.cell(m, layer), counts_MLGE[m, layer])
        loads_E = counts_MLGE[m, layer].sum(axis=0, dtype=np.int64)
        _, least_ML[m, layer] = level_quotas(hosts.expert_H, hosts.rank_H, loads_E, plan.topology.num_ranks)
    return least_ML


def cross_node_gap(plan: StepPlan, counts_MLGE: NDArray[np.integer], tolerance: float, sampled: int) -> float:
    """Share of assignments served on another node, above the least with the same replicas, on average over cells.

    Args:
        plan: of these counts.
        counts_MLGE: integers [M, L, G, E].
        tolerance: of the plan: no rank serves more than 1 + this times the mean, or than the plan's slowest.
        sampled: how many cells to look at, spread over the step.
    """
    num_micro_steps, num_layers, _ = plan.shape
    cells = np.unique(np.linspace(0, num_micro_steps * num_layers - 1, sampled).astype(int))
    gaps = []
    for m, layer in (divmod(int(c), num_layers) for c in cells):
        counts_GE = counts_MLGE[m, layer].astype(np.int64)
        assignment = CellHosts.of(plan.cell(m, layer), counts_GE)
        node_G = plan.topology.node_G
        here_HG = node_G[assignment.rank_H][:, None] == node_G
        crossing = int(assignment.tokens_HG[~here_HG].sum())
        mean = counts_GE.sum() / plan.topology.num_ranks
        most = max(math.ceil(mean * (1 + tolerance)), int(assignment.loads_G.max()))
        gaps.append((crossing - least_crossing(assignment, counts_GE, node_G, most)) / counts_GE.sum())
    return float(np.mean(gaps))


def least_crossing(
    assignment: CellHosts, counts_GE: NDArray[np.int64], node_G: NDArray[np.integer], most: int
) -> float:
    """The fewest assignments that cross nodes when these hosts serve all and no rank more than `most`."""
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    num_nodes, num_experts, num_hosts = int(node_G[-1]) + 1, counts_GE.shape[1], len(assignment.rank_H)
    counts_NE = np.zeros((num_nodes, num_experts))
    np.add.at(counts_NE, node_G, counts_GE)
    node_V, host_V = (index.ravel() for index in np.indices((num_nodes, num_hosts)))  # a variable per node and host
    expert_V, rank_V = assignment.expert_H[host_V], assignment.rank_H[host_V]
    every = np.arange(len(node_V))

    def rows(row_V: NDArray[Any], count: int) -> Any:
        return csr_array((np.ones(len(every)), (row_V, every)), shape=(count, len(every)))

    answer = linprog(
        (node_G[rank_V] != node_V).astype(float),
        A_ub=rows(rank_V, len(node_G)),
        b_ub=np.full(len(node_G), float(most)),
        A_eq=rows(node_V * num_experts + expert_V, num_nodes * num_experts),
        b_eq=counts_NE.ravel(),
        method="highs",
    )
    return float(answer.fun)
