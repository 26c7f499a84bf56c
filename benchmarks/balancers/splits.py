"""Integer splits of tokens over given hosts by quotas that level the ranks, with the nearest sources first.

Quotas with the least largest load are the linear program of token splits, solved exactly by flow. A rank above the
target passes load along the shortest chain of ranks that share experts to one below it. Where no chain is left, the
ranks Q that can be reached have all hosts of all their experts among themselves, so no split serves them with less than
their mean: that is the next target. The last Q proves that the result is optimal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreroute.kernels import kernel
from foreroute.planner.split import take_near
from foreroute.simulate.eplb import by_key


@kernel
def split_by_quota(expert_H: Any, rank_H: Any, quota_H: Any, ranks_per_node: int, counts_GE: Any) -> Any:
    """Fill the quota of every host from its own rank's assignments, then from its node's, then from the rest.

    Args:
        expert_H: int32 [H].
        rank_H: int32 [H].
        quota_H: int64 [H], adding up to the assignments of each expert.
        ranks_per_node: of the topology.
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
        for size in (1, ranks_per_node, num_ranks):
            for h in host_H[first_E[e] : first_E[e + 1]]:
                quota_H[h] = take_near(tokens_HG[h], rest_G, quota_H[h], rank_H[h], size)
    return tokens_HG


@kernel
def level_quotas(expert_H: Any, rank_H: Any, loads_E: Any, num_ranks: int) -> Any:
    """Quotas of all hosts with the least largest load of a rank.

    Args:
        expert_H: int32 [H].
        rank_H: int32 [H]; no pair of expert and rank twice.
        loads_E: int64 [E]; 0 for an expert without host.
        num_ranks: G.

    Returns:
        quota_H: int64 [H], adding up to `loads_E`.
        target: the largest load, the smallest that integers allow.
    """
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


@kernel
def _even(expert_H: Any, loads_E: Any, first_E: Any) -> Any:
    quota_H = np.zeros(len(expert_H), np.int64)
    seen_E = np.zeros(len(loads_E), np.int64)
    for h in range(len(expert_H)):
        e = expert_H[h]
        copies = first_E[e + 1] - first_E[e]
        quota_H[h] = loads_E[e] // copies + (seen_E[e] < loads_E[e] % copies)
        seen_E[e] += 1
    return quota_H
