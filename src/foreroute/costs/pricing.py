"""The cost model of `costs.py` on one cell, compiled: who sends what over which link, and how long everything takes.

Hosts are given as in `CellHosts`, a cost model as `Prices`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from foreroute.costs.model import expert_seconds
from foreroute.kernels import kernel

CLUSTER_OUT, CLUSTER_IN, NODE_OUT, NODE_IN = range(4)
ATTENTION, ALL_TO_ALL, EXPERTS, FIXED, EXPOSED = range(5)

_expert_seconds = njit(nogil=True, inline="always")(expert_seconds)


@kernel
def pairs_between(rank_H: Any, tokens_HG: Any) -> Any:
    """int64 [G, G], assignments of each source rank (first axis) that each rank serves."""
    num_ranks = tokens_HG.shape[1]
    pairs_GG = np.zeros((num_ranks, num_ranks), np.int64)
    for h in range(len(rank_H)):
        for g in range(num_ranks):
            pairs_GG[g, rank_H[h]] += tokens_HG[h, g]
    return pairs_GG


@kernel
def rows_sent(pairs_GG: Any, prices: Any) -> Any:
    """float64 [G, 4], rows of one dispatch over each rank's NIC out, NIC in, node link out and node link in.

    Deduplicated ones are an estimate: they take the K picks of a token for independent draws, so that n tokens that
    send a share p of their picks somewhere reach it n * (1 - (1 - p) ** K) times.
    """
    num_ranks = len(pairs_GG)
    if not prices.dedup:
        return _rows_of_copies(pairs_GG, prices.ranks_per_node)
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
            if g // ranks_per_node != q // ranks_per_node:
                rows_G4[g, CLUSTER_OUT] += pairs_GG[g, q]
                rows_G4[q, CLUSTER_IN] += pairs_GG[g, q]
            elif g != q:
                rows_G4[g, NODE_OUT] += pairs_GG[g, q]
                rows_G4[q, NODE_IN] += pairs_GG[g, q]
    return rows_G4


@kernel
def rows_of_reach(reach_GN: Any, reach_GG: Any, ranks_per_node: int) -> Any:
    """float64 [G, 4] as `rows_sent`, deduplicated.

    Args:
        reach_GN: tokens of each source rank that have a pick on each node.
        reach_GG: tokens of each source rank that have a pick on each rank.
        ranks_per_node: of the topology.
    """
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
    """One dispatch, or one combine, which sends the same rows back: the slowest link of any rank, and the latency."""
    slowest = 0.0
    for g in range(len(rows_G4)):
        cluster = max(rows_G4[g, CLUSTER_OUT], rows_G4[g, CLUSTER_IN]) * prices.cluster_row_s
        node = max(rows_G4[g, NODE_OUT], rows_G4[g, NODE_IN]) * prices.node_row_s
        slowest = max(slowest, cluster, node)
    return slowest + prices.latency_s


@kernel
def experts_by_rank(rank_H: Any, tokens_H: Any, num_ranks: int, prices: Any) -> Any:
    """float64 [G] twice, seconds of each rank's experts in a forward pass, and in a backward pass."""
    forward_G, backward_G = np.zeros(num_ranks), np.zeros(num_ranks)
    for h in range(len(rank_H)):
        forward_G[rank_H[h]] += _expert_seconds(
            tokens_H[h], prices.tile_rows, prices.row_s, prices.weight_s, prices.pair_s
        )
        backward_G[rank_H[h]] += _expert_seconds(
            tokens_H[h],
            prices.tile_rows,
            prices.backward_gemm * prices.row_s,
            prices.backward_weights * prices.weight_s,
            prices.backward_memory * prices.pair_s,
        )
    return forward_G, backward_G


@kernel
def transfer_seconds(expert_H: Any, rank_H: Any, fetched_H: Any, home_E: Any, num_ranks: int, prices: Any) -> Any:
    """Seconds of the ranks' transfers for one fetch of all replicas from host memory, float64 [G], for one over the
    direct path, and for the return of their gradients, both float64 [G, 4].
    """
    host_G = np.zeros(num_ranks)
    direct_G4, gradient_G4 = np.zeros((num_ranks, 4)), np.zeros((num_ranks, 4))
    for h in range(len(rank_H)):
        rank, home = rank_H[h], home_E[expert_H[h]]
        if not fetched_H[h]:
            continue
        host_G[rank] += prices.host_fetch_s
        if rank // prices.ranks_per_node != home // prices.ranks_per_node:
            direct_G4[home, CLUSTER_OUT] += prices.cluster_fetch_s
            direct_G4[rank, CLUSTER_IN] += prices.cluster_fetch_s
            gradient_G4[rank, CLUSTER_OUT] += prices.cluster_gradient_s
            gradient_G4[home, CLUSTER_IN] += prices.cluster_gradient_s
        elif rank != home:
            direct_G4[home, NODE_OUT] += prices.node_fetch_s
            direct_G4[rank, NODE_IN] += prices.node_fetch_s
            gradient_G4[rank, NODE_OUT] += prices.node_gradient_s
            gradient_G4[home, NODE_IN] += prices.node_gradient_s
    return host_G, direct_G4, gradient_G4


@kernel
def cell_seconds(
    rows_G4: Any,
    expert_H: Any,
    rank_H: Any,
    tokens_H: Any,
    fetched_H: Any,
    home_E: Any,
    attention_s: Any,
    prices: Any,
) -> Any:
    """float64 [2 stages, 5 parts]: recompute and update; attention, all-to-all, experts, fixed, exposed transfers.

    Transfers of a cell run beside the cell before it and are taken to find the time of this one: a layer's time once
    the pipeline of layers runs. What they take beyond that is exposed. Host fetches have the whole of a group of
    passes; direct fetches and gradients share the links with the all-to-all, and have the rest of the update, waiting
    for host fetches included.

    Args:
        rows_G4: of `rows_sent` or `rows_of_reach`.
        expert_H: of a `CellHosts`.
        rank_H: likewise.
        tokens_H: assignments of each host.
        fetched_H: of a `CellHosts`.
        home_E: where gradients go.
        attention_s: of the slowest rank, in a forward pass and in a backward pass.
        prices: the cost model.
    """
    num_ranks = len(rows_G4)
    leg_s = all_to_all_seconds(rows_G4, prices)
    forward_G, backward_G = experts_by_rank(rank_H, tokens_H, num_ranks, prices)
    host_G, direct_G4, shared_G4 = transfer_seconds(expert_H, rank_H, fetched_H, home_E, num_ranks, prices)
    forward_s, backward_s, fetch_s, shared_s = 0.0, 0.0, 0.0, 0.0
    for g in range(num_ranks):
        forward_s, backward_s = max(forward_s, forward_G[g]), max(backward_s, backward_G[g])
        fetch_s = max(fetch_s, host_G[g])
    parts_SP = np.zeros((2, 5))
    for stage, forwards, backwards in prices.groups:
        attention = forwards * attention_s[0] + backwards * attention_s[1]
        all_to_all = 2 * (forwards + backwards) * leg_s
        experts = forwards * forward_s + backwards * backward_s
        fixed = (forwards + backwards) * prices.layer_s
        parts_SP[stage, ATTENTION] += attention
        parts_SP[stage, ALL_TO_ALL] += all_to_all
        parts_SP[stage, EXPERTS] += experts
        parts_SP[stage, FIXED] += fixed
        if stage == 1 and prices.direct:
            for g in range(num_ranks):
                for link in range(4):
                    shared_G4[g, link] += direct_G4[g, link]
        else:
            parts_SP[stage, EXPOSED] += max(0.0, fetch_s - (attention + all_to_all + experts + fixed))
    for g in range(num_ranks):
        for link in range(4):
            shared_s = max(shared_s, shared_G4[g, link])
    # an update's links are free while nothing is exchanged between ranks
    update_s = 0.0
    for part in range(parts_SP.shape[1]):
        update_s += parts_SP[1, part]
    parts_SP[1, EXPOSED] += max(0.0, shared_s - (update_s - parts_SP[1, ALL_TO_ALL]))
    return parts_SP
