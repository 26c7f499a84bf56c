"""The best that the replicas of a plan allow: loads by maximum flow, and traffic by linear program."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from benchmarks.balancers.laer import by_key
from foreroute.plan import CellPlan, StepPlan


@dataclass(frozen=True, eq=False)
class CellHosts:
    """Hosts of all experts in one cell, homes among them, for those that count anew what a plan says.

    `tokens_HG` are assignments that each host serves, by source rank; over the hosts of an expert they are the counts.
    """

    expert_H: NDArray[np.int32]
    rank_H: NDArray[np.int32]
    tokens_HG: NDArray[np.int64]
    fetched_H: NDArray[np.bool_]

    @classmethod
    def of(cls, cell: CellPlan, counts_GE: NDArray[np.integer]) -> CellHosts:
        """Join homes and replicas of a planned cell."""
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
    """Average over `sampled` cells the share of assignments on another node, above the least with the same replicas.

    No rank serves more than 1 + `tolerance` times the mean, or than the plan's slowest.
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
        # the plan's own slowest rank may stand above the tolerance, where slots lack
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


@njit(cache=True, nogil=True)
def level_quotas(expert_H: Any, rank_H: Any, loads_E: Any, num_ranks: int) -> Any:
    """int64 [H], quotas of all hosts with the least largest load of a rank, which comes with them, by flow."""
    # A rank above the target passes load along the shortest chain of ranks that share experts to one below it. Where no
    # chain is left, the ranks Q that can be reached have all hosts of all their experts among themselves, so no split
    # serves them with less than their mean: that is the next target. The last Q proves that the result is optimal.
    hosts_E, of_expert = by_key(expert_H, len(loads_E))
    hosts_G, of_rank = by_key(rank_H, num_ranks)
    quota_H = _even(expert_H, loads_E, hosts_E)
    load_G = np.zeros(num_ranks, np.int64)
    for h in range(len(rank_H)):
        load_G[rank_H[h]] += quota_H[h]
    target = (load_G.sum() + num_ranks - 1) // num_ranks
    came_from, came_to = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    queue, width_G = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64)
    # Invariant: quota_H adds up to loads_E by expert; `target` is a lower bound of every split over these hosts.
    while True:
        start = load_G.argmax()
        if load_G[start] <= target:
            return quota_H, target
        came_from[:] = -1
        width_G[:] = 0
        width_G[start] = load_G[start] - target
        queue[0], head, tail, end = start, 0, 1, -1
        while head < tail and end < 0:
            a = queue[head]
            head += 1
            for i in range(hosts_G[a], hosts_G[a + 1]):
                h = of_rank[i]
                if quota_H[h] == 0:
                    continue
                e = expert_H[h]
                for j in range(hosts_E[e], hosts_E[e + 1]):
                    b = rank_H[of_expert[j]]
                    if width_G[b] == 0:
                        width_G[b] = min(width_G[a], quota_H[h])
                        came_from[b], came_to[b] = h, of_expert[j]
                        queue[tail] = b
                        tail += 1
                        if load_G[b] < target:
                            end = b
                            break
                if end >= 0:
                    break
        if end < 0:
            total = 0
            for i in range(tail):
                total += load_G[queue[i]]
            target = (total + tail - 1) // tail
            continue
        amount = min(width_G[end], target - load_G[end])
        load_G[start] -= amount
        load_G[end] += amount
        while end != start:
            quota_H[came_from[end]] -= amount
            quota_H[came_to[end]] += amount
            end = rank_H[came_from[end]]


@njit(cache=True, nogil=True)
def _even(expert_H: Any, loads_E: Any, first_E: Any) -> Any:
    quota_H = np.zeros(len(expert_H), np.int64)
    seen_E = np.zeros(len(loads_E), np.int64)
    for h in range(len(expert_H)):
        e = expert_H[h]
        copies = first_E[e + 1] - first_E[e]
        quota_H[h] = loads_E[e] // copies + (seen_E[e] < loads_E[e] % copies)
        seen_E[e] += 1
    return quota_H
