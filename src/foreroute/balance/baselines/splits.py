"""Integer splits of tokens over given hosts: evenly, or by quotas with the nearest sources first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.kernels import kernel


@kernel
def even_split(expert_H: Any, copies_H: Any, counts_GE: Any) -> Any:
    """Every source divides its assignments evenly over the copies of an expert; remainders go round.

    Args:
        expert_H: int32 [H].
        copies_H: int32 [H], copies of the expert on this rank.
        counts_GE: int64 [G, E].

    Returns:
        tokens_HG: int64 [H, G]. The copies of an expert serve the same, give or take one.
    """
    num_ranks, num_experts = counts_GE.shape
    first_E, host_H = by_key(expert_H, num_experts)
    tokens_HG = np.zeros((len(expert_H), num_ranks), np.int64)
    for e in range(num_experts):
        hosts = host_H[first_E[e] : first_E[e + 1]]
        copies = 0
        for h in hosts:
            copies += copies_H[h]
        if copies == 0:
            continue
        turn = 0
        for g in range(num_ranks):
            share = counts_GE[g, e] // copies
            left = counts_GE[g, e] - share * copies
            place = copies - turn if turn > 0 else 0  # of the host's first copy, counted from the one whose turn it is
            for h in hosts:
                tokens = share * copies_H[h]
                for _ in range(copies_H[h]):
                    tokens += place < left
                    place = place + 1 if place + 1 < copies else 0
                tokens_HG[h, g] = tokens
            turn = turn + left if turn + left < copies else turn + left - copies
    return tokens_HG


@kernel
def split_by_quota(expert_H: Any, rank_H: Any, quota_H: Any, node_G: Any, counts_GE: Any) -> Any:
    """Fill the quota of every host from its own rank's assignments, then from its node's, then from the rest.

    Args:
        expert_H: int32 [H].
        rank_H: int32 [H].
        quota_H: int64 [H], adding up to the assignments of each expert.
        node_G: int16 [G].
        counts_GE: int64 [G, E].

    Returns:
        tokens_HG: int64 [H, G]. No split with these quotas keeps more on the rank, or in the node.
    """
    num_ranks, num_experts = counts_GE.shape
    first_E, host_H = by_key(expert_H, num_experts)
    tokens_HG = np.zeros((len(expert_H), num_ranks), np.int64)
    quota_H = quota_H.copy()
    rest_G = np.empty(num_ranks, np.int64)
    for e in range(num_experts):
        rest_G[:] = counts_GE[:, e]
        for reach in range(3):
            for h in host_H[first_E[e] : first_E[e + 1]]:
                rank = rank_H[h]
                for g in range(num_ranks):
                    if quota_H[h] == 0:
                        break
                    if rest_G[g] > 0 and (reach == 2 or g == rank or (reach == 1 and node_G[g] == node_G[rank])):
                        tokens = min(rest_G[g], quota_H[h])
                        tokens_HG[h, g] += tokens
                        quota_H[h] -= tokens
                        rest_G[g] -= tokens
    return tokens_HG


@kernel
def by_key(key_H: Any, size: int) -> Any:
    """Hosts in order of an integer key: int64 [size + 1], where those of each key begin, and int64 [H], the hosts."""
    first = np.zeros(size + 1, np.int64)
    for key in key_H:
        first[key + 1] += 1
    first = np.cumsum(first)
    place, host_H = first.copy(), np.empty(len(key_H), np.int64)
    for h in range(len(key_H)):
        host_H[place[key_H[h]]] = h
        place[key_H[h]] += 1
    return first, host_H


def loads(rank_H: NDArray[np.int32], tokens_HG: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [G], assignments that each rank serves."""
    loads_G = np.zeros(tokens_HG.shape[1], np.int64)
    np.add.at(loads_G, rank_H, tokens_HG.sum(axis=1))
    return loads_G
