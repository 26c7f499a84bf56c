"""The cost model on one cell, compiled: how long experts, exchanges and transfers take. Hosts are as in `CellHosts`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from foreroute.costs.links import HOST, all_to_all_seconds, transfer_seconds
from foreroute.costs.model import expert_seconds
from foreroute.kernels import kernel

ATTENTION, ALL_TO_ALL, EXPERTS, FIXED, EXPOSED = range(5)

_expert_seconds = njit(nogil=True, inline="always")(expert_seconds)


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
    the pipeline of layers runs. What they take beyond that is exposed. Copies from host memory have the whole of a
    group of passes; fetches and gradients over links share these with the all-to-all, and have the rest of their
    stage, waiting for copies included.

    Args:
        rows_G4: of `rows_sent` or `rows_of_reach`.
        expert_H: integers [H], as in `CellHosts`.
        rank_H: integers [H], as in `CellHosts`.
        tokens_H: integers [H], assignments of each host.
        fetched_H: bool [H], as in `CellHosts`.
        home_E: where gradients go.
        attention_s: of the slowest rank, in a forward pass and in a backward pass.
        prices: the cost model.
    """
    num_ranks = len(rows_G4)
    leg_s = all_to_all_seconds(rows_G4, prices)
    forward_G, backward_G = experts_by_rank(rank_H, tokens_H, num_ranks, prices)
    fetch_G5, gradient_G5 = transfer_seconds(expert_H, rank_H, fetched_H, home_E, num_ranks, prices)
    forward_s, backward_s, copies_s = 0.0, 0.0, 0.0
    for g in range(num_ranks):
        forward_s, backward_s = max(forward_s, forward_G[g]), max(backward_s, backward_G[g])
        copies_s = max(copies_s, fetch_G5[g, HOST])
    parts_SP, fetches_S = np.zeros((2, 5)), np.zeros(2)
    for stage, forwards, backwards in prices.groups:
        attention = forwards * attention_s[0] + backwards * attention_s[1]
        all_to_all = 2 * (forwards + backwards) * leg_s
        experts = forwards * forward_s + backwards * backward_s
        fixed = (forwards + backwards) * prices.layer_s
        parts_SP[stage, ATTENTION] += attention
        parts_SP[stage, ALL_TO_ALL] += all_to_all
        parts_SP[stage, EXPERTS] += experts
        parts_SP[stage, FIXED] += fixed
        parts_SP[stage, EXPOSED] += max(0.0, copies_s - (attention + all_to_all + experts + fixed))
        fetches_S[stage] += 1
    for stage in range(2):
        links_s, free_s = 0.0, 0.0
        for g in range(num_ranks):
            for link in range(HOST):
                links_s = max(links_s, fetches_S[stage] * fetch_G5[g, link] + stage * gradient_G5[g, link])
        # links are free while nothing is exchanged between ranks
        for part in range(parts_SP.shape[1]):
            free_s += 0.0 if part == ALL_TO_ALL else parts_SP[stage, part]
        parts_SP[stage, EXPOSED] += max(0.0, links_s - free_s)
    return parts_SP
