"""The cost model on one cell: how long experts, exchanges and transfers take, and which parts of a step that is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from foreroute.costs.links import HOST, all_to_all_seconds, pairs_between, rows_sent, transfer_seconds
from foreroute.costs.model import BACKWARD, FORWARD, CostModel, Prices, expert_seconds
from foreroute.kernels import kernel
from foreroute.plan.hosts import CellPlan, Hosts
from foreroute.plan.options import PASS_NAMES, SlotSharing
from foreroute.plan.topology import Topology

PART_NAMES = ("attention", "all-to-all", "experts", "fixed", "exposed transfers")
ATTENTION, ALL_TO_ALL, EXPERTS, FIXED, EXPOSED = range(5)

_expert_seconds = njit(nogil=True, inline="always")(expert_seconds)


def slowest_attention(counts_XGE: NDArray[np.integer], costs: CostModel) -> NDArray[np.float64]:
    """float64 [..., 2], seconds of the slowest rank's attention in a forward and in a backward pass of cells."""
    # a rank has K assignments for each of its tokens
    tokens_XG = counts_XGE.sum(axis=-1) / costs.model.top_k
    return np.stack([costs.attention_seconds(tokens_XG, one=one).max(axis=-1) for one in (FORWARD, BACKWARD)], axis=-1)


def step_parts(
    hosts: Hosts, counts_MLGE: NDArray[np.int32], topology: Topology, costs: CostModel, slots: SlotSharing = "layer"
) -> NDArray[np.float64]:
    """float64 [2, 5], seconds of `PASS_NAMES` and `PART_NAMES` of a step, one cell of int32 [M, L, G, E] after another.

    Deduplicated rows are estimated: on generated routes of 16 to 64 ranks 0 to 7 % low over NICs, 6 to 10 % inside
    nodes, and 0 to 3 % in seconds.
    """
    # no placement of experts changes attention, so it is priced once for all cells
    prices, attention_ML2 = costs.prices(topology, slots), slowest_attention(counts_MLGE, costs)
    parts_SP = np.zeros((len(PASS_NAMES), len(PART_NAMES)))
    for m, layer in np.ndindex(*counts_MLGE.shape[:2]):
        parts_SP += cell_seconds(hosts.cell(m, layer), counts_MLGE[m, layer], attention_ML2[m, layer], prices)
    return parts_SP


def least_seconds(counts_MLGE: NDArray[np.integer], topology: Topology, costs: CostModel) -> NDArray[np.float64]:
    """float64 [M, L], seconds of recompute and update of every cell that no plan of counts [M, L, G, E] can beat.

    How little a link must carry when slots are few is not bounded, so where traffic is most of the time, no plan comes
    near.
    """
    # Splitting an expert over hosts adds tiles and reads of weights and never saves any, so whole experts, spread over
    # all ranks to the last second, bound the work from below. No placement of experts changes attention.
    loads_MLE = counts_MLGE.sum(axis=2, dtype=np.int64)
    experts_s = [costs.expert_seconds(loads_MLE, one).sum(axis=2) / topology.num_ranks for one in (FORWARD, BACKWARD)]
    prices = costs.prices(topology)
    passes_ML2 = slowest_attention(counts_MLGE, costs) + np.stack(experts_s, axis=-1)
    passes_ML2 += prices.layer_s + 2 * prices.latency_s
    passes_2 = np.array(prices.groups)[:, 1:].sum(axis=0)
    seconds_ML: NDArray[np.float64] = passes_ML2 @ passes_2
    return seconds_ML


@kernel
def experts_by_rank(cell: CellPlan, counts_GE: Any, prices: Prices) -> Any:
    """float64 [G] twice, seconds of each rank's experts in a forward pass, and in a backward pass."""
    num_ranks, num_experts = counts_GE.shape
    forward_G, backward_G = np.zeros(num_ranks), np.zeros(num_ranks)
    home_tokens_E = np.zeros(num_experts, np.int64)
    for g in range(num_ranks):
        for e in range(num_experts):
            home_tokens_E[e] += counts_GE[g, e]
    for r in range(len(cell.expert_R)):
        tokens = 0
        for g in range(num_ranks):
            tokens += cell.tokens_RG[r, g]
        # the home serves what no replica does
        rank, home = cell.rank_R[r], cell.home_E[cell.expert_R[r]]
        home_tokens_E[cell.expert_R[r]] -= tokens
        forward_G[rank] += _expert_seconds(tokens, prices.forward)
        backward_G[rank] += _expert_seconds(tokens, prices.backward)
        if rank != home:
            # both ends spend time on a replica, whatever it serves
            for end in (rank, home):
                forward_G[end] += prices.forward.replica_s
                backward_G[end] += prices.backward.replica_s
    for e in range(num_experts):
        forward_G[cell.home_E[e]] += _expert_seconds(home_tokens_E[e], prices.forward)
        backward_G[cell.home_E[e]] += _expert_seconds(home_tokens_E[e], prices.backward)
    return forward_G, backward_G


@kernel
def cell_seconds(cell: CellPlan, counts_GE: Any, attention_s: Any, prices: Prices) -> Any:
    """Give what `seconds_of_rows` gives for the rows that `rows_sent` estimates."""
    rows_G4 = rows_sent(pairs_between(cell, counts_GE), prices)
    return seconds_of_rows(rows_G4, cell, counts_GE, attention_s, prices)


@kernel
def seconds_of_rows(rows_G4: Any, cell: CellPlan, counts_GE: Any, attention_s: Any, prices: Prices) -> Any:
    """float64 [2 passes, 5 parts], seconds of a cell whose dispatch sends `rows_G4`.

    `attention_s` are those of the slowest rank, in a forward pass and in a backward pass.
    """
    num_ranks = len(rows_G4)
    leg_s = all_to_all_seconds(rows_G4, prices)
    forward_G, backward_G = experts_by_rank(cell, counts_GE, prices)
    fetch_G5, gradient_G5 = transfer_seconds(cell.expert_R, cell.rank_R, cell.fetched_R, cell.home_E, num_ranks, prices)
    forward_s, backward_s, copies_s = 0.0, 0.0, 0.0
    for g in range(num_ranks):
        forward_s, backward_s = max(forward_s, forward_G[g]), max(backward_s, backward_G[g])
        copies_s = max(copies_s, fetch_G5[g, HOST])
    parts_SP, fetches_S = np.zeros((2, 5)), np.zeros(2)
    for pass_index, forwards, backwards in prices.groups:
        attention = forwards * attention_s[0] + backwards * attention_s[1]
        all_to_all = 2 * (forwards + backwards) * leg_s
        experts = forwards * forward_s + backwards * backward_s
        fixed = (forwards + backwards) * prices.layer_s
        parts_SP[pass_index, ATTENTION] += attention
        parts_SP[pass_index, ALL_TO_ALL] += all_to_all
        parts_SP[pass_index, EXPERTS] += experts
        parts_SP[pass_index, FIXED] += fixed
        # Transfers run beside the cell before, which is taken to be as long as this one: a layer's time once the
        # pipeline of layers runs. Copies from host memory have the whole of a group of passes. Slots that a layer keeps
        # are filled once in a pass, shared ones for each group.
        if prices.refetches or fetches_S[pass_index] == 0:
            parts_SP[pass_index, EXPOSED] += max(0.0, copies_s - (attention + all_to_all + experts + fixed))
            fetches_S[pass_index] += 1
    for pass_index in range(2):
        links_s, free_s = 0.0, 0.0
        for g in range(num_ranks):
            for link in range(HOST):
                links_s = max(links_s, fetches_S[pass_index] * fetch_G5[g, link] + pass_index * gradient_G5[g, link])
        # links are free while nothing is exchanged between ranks, waits for copies included
        for part in range(parts_SP.shape[1]):
            free_s += 0.0 if part == ALL_TO_ALL else parts_SP[pass_index, part]
        parts_SP[pass_index, EXPOSED] += max(0.0, links_s - free_s)
    return parts_SP
