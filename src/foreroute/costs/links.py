"""The one price of moving bytes: which links carry rows, weights and gradients, and for how long. Compiled.

A rank has five links: its NIC and its link inside the node, one way and the other, and its copy engine, which reads
host memory. A move between ranks of a node goes over the links inside it, one between nodes over NICs, and both ends
are busy for as long. Weights of replicas come from the memory of the node's host where `CostModel.paths` says so; that
memory is shared by the ranks of a node, so weights of another node go over NICs in any case.

Planner, simulator and schedule go by this: `plan.schedule` marks the moves that executors make through host memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreroute.kernels import kernel
from foreroute.plan.hosts import CellPlan

CLUSTER_OUT, CLUSTER_IN, NODE_OUT, NODE_IN, HOST = range(5)
"""Columns of arrays over the links of a rank; those over four have no HOST."""


@kernel
def pairs_between(cell: CellPlan, counts_GE: Any) -> Any:
    """int64 [G, G], assignments of each source rank (first axis) that each rank serves, of counts [G, E]."""
    num_ranks, num_experts = counts_GE.shape
    pairs_GG = np.zeros((num_ranks, num_ranks), np.int64)
    for g in range(num_ranks):
        for e in range(num_experts):
            pairs_GG[g, cell.home_E[e]] += counts_GE[g, e]
    for r in range(len(cell.expert_R)):
        rank, home = cell.rank_R[r], cell.home_E[cell.expert_R[r]]
        for g in range(num_ranks):
            pairs_GG[g, rank] += cell.tokens_RG[r, g]
            pairs_GG[g, home] -= cell.tokens_RG[r, g]
    return pairs_GG


@kernel
def rows_sent(pairs_GG: Any, prices: Any) -> Any:
    """float64 [G, 4], rows of one dispatch over each rank's NIC out, NIC in, node link out and node link in."""
    num_ranks = len(pairs_GG)
    if not prices.dedup:
        return _rows_of_copies(pairs_GG, prices.ranks_per_node)
    # An estimate, since counts do not tell which picks are of one token: with K independent draws, n tokens that send a
    # share p of their picks somewhere reach it n * (1 - (1 - p) ** K) times.
    num_nodes = num_ranks // prices.ranks_per_node
    reach_GN, reach_GG = np.zeros((num_ranks, num_nodes)), np.zeros((num_ranks, num_ranks))
    for g in range(num_ranks):
        pairs = 0
        for q in range(num_ranks):
            pairs += pairs_GG[g, q]
        if pairs == 0:
            continue
        tokens = pairs / prices.top_k
        for node in range(num_nodes):
            first = node * prices.ranks_per_node
            inside = 0
            for q in range(first, first + prices.ranks_per_node):
                inside += pairs_GG[g, q]
                reach_GG[g, q] = tokens * (1.0 - (1.0 - pairs_GG[g, q] / pairs) ** prices.top_k)
            reach_GN[g, node] = tokens * (1.0 - (1.0 - inside / pairs) ** prices.top_k)
    return rows_of_reach(reach_GN, reach_GG, prices.ranks_per_node)


@kernel
def _rows_of_copies(pairs_GG: Any, ranks_per_node: int) -> Any:
    num_ranks = len(pairs_GG)
    rows_G4 = np.zeros((num_ranks, 4))
    for g in range(num_ranks):
        for q in range(num_ranks):
            if g != q:
                is_near = g // ranks_per_node == q // ranks_per_node
                rows_G4[g, NODE_OUT if is_near else CLUSTER_OUT] += pairs_GG[g, q]
                rows_G4[q, NODE_IN if is_near else CLUSTER_IN] += pairs_GG[g, q]
    return rows_G4


@kernel
def rows_of_reach(reach_GN: Any, reach_GG: Any, ranks_per_node: int) -> Any:
    """float64 [G, 4] as `rows_sent`, of the tokens of each source with a pick on each node, and on each rank."""
    num_ranks, num_nodes = reach_GN.shape
    rows_G4 = np.zeros((num_ranks, 4))
    for g in range(num_ranks):
        for node in range(num_nodes):
            # as DeepEP sends them: a row crosses to a node once, to the rank with the source's number there, and that
            # rank passes it on; on the source's own node it is the source itself
            relay = node * ranks_per_node + g % ranks_per_node
            if relay != g:
                rows_G4[g, CLUSTER_OUT] += reach_GN[g, node]
                rows_G4[relay, CLUSTER_IN] += reach_GN[g, node]
            for q in range(node * ranks_per_node, (node + 1) * ranks_per_node):
                if q != relay:
                    rows_G4[relay, NODE_OUT] += reach_GG[g, q]
                    rows_G4[q, NODE_IN] += reach_GG[g, q]
    return rows_G4


@kernel
def all_to_all_seconds(rows_G4: Any, prices: Any) -> Any:
    """Seconds of one dispatch, or of one combine, which sends the same rows back."""
    slowest = 0.0
    for g in range(len(rows_G4)):
        cluster = max(rows_G4[g, CLUSTER_OUT], rows_G4[g, CLUSTER_IN]) * prices.cluster_row_s
        node = max(rows_G4[g, NODE_OUT], rows_G4[g, NODE_IN]) * prices.node_row_s
        # links work beside each other, and all ranks wait for the slowest
        slowest = max(slowest, cluster, node)
    return slowest + prices.latency_s


@kernel
def transfer_seconds(expert_R: Any, rank_R: Any, fetched_R: Any, home_E: Any, num_ranks: int, prices: Any) -> Any:
    """float64 [G, 5] twice, seconds of each link for one fetch of the replicas in `fetched_R`, and for all gradients.

    `expert_R` and `rank_R` are integers [R], `home_E` [E]. Replicas at home move nothing.
    """
    fetch_G5, gradient_G5 = np.zeros((num_ranks, 5)), np.zeros((num_ranks, 5))
    for r in range(len(rank_R)):
        rank, home = rank_R[r], home_E[expert_R[r]]
        if rank == home:
            continue
        out, into, fetch_s, gradient_s = CLUSTER_OUT, CLUSTER_IN, prices.cluster_fetch_s, prices.cluster_gradient_s
        if rank // prices.ranks_per_node == home // prices.ranks_per_node:
            out, into, fetch_s, gradient_s = NODE_OUT, NODE_IN, prices.node_fetch_s, prices.node_gradient_s
        if fetched_R[r] and rank // prices.memory_ranks == home // prices.memory_ranks:
            fetch_G5[rank, HOST] += prices.host_fetch_s
        elif fetched_R[r]:
            fetch_G5[home, out] += fetch_s
            fetch_G5[rank, into] += fetch_s
        # from every replica, and never through host memory: a slot keeps weights, but not what one micro-step adds
        gradient_G5[rank, out] += gradient_s
        gradient_G5[home, into] += gradient_s
    return fetch_G5, gradient_G5
