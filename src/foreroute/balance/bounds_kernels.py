"""The inner loops of the bounds. Compiled; loaded on first use."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreroute.kernels import kernel


@kernel
def equal_splits(load_CE: Any, num_ranks: Any, copies: Any, least_C: Any) -> None:
    """Give `copies` further copies, one by one, to the expert with the largest share. `least_C`: float64 [C], written.

    That is optimal: as long as the largest share is not the least possible, its expert needs one more copy.
    """
    share_E, count_E = np.empty(load_CE.shape[1]), np.empty(load_CE.shape[1], np.int64)
    for c in range(load_CE.shape[0]):
        for e in range(len(share_E)):
            share_E[e], count_E[e] = load_CE[c, e], 1
        for _ in range(copies):
            hottest = np.argmax(share_E)
            if count_E[hottest] == num_ranks:
                break
            count_E[hottest] += 1
            share_E[hottest] = load_CE[c, hottest] / count_E[hottest]
        least_C[c] = max(share_E.max(), load_CE[c].sum() / num_ranks)


@kernel
def slot_limits(load_CE: Any, num_ranks: Any, slots: Any, least_C: Any) -> None:
    """Bisect for the smallest T, from the mean on, with sum(max(1, ceil(load / T))) <= slots. int64 [C], written."""
    for c in range(load_CE.shape[0]):
        total = load_CE[c].sum()
        low, high = -(-total // num_ranks), max(load_CE[c].max(), -(-total // num_ranks))
        while low < high:
            middle = (low + high) // 2
            needed = 0
            for e in range(load_CE.shape[1]):
                needed += max(1, -(-load_CE[c, e] // middle))
            if needed <= slots:
                high = middle
            else:
                low = middle + 1
        least_C[c] = low


@kernel
def fixed_hosts(load_CE: Any, expert_H: Any, rank_H: Any, offsets: Any, num_ranks: Any, least_C: Any) -> None:
    """Least load of the slowest rank for given hosts, per cell: int64 [C], written; -1 where a load has no host."""
    for c in range(load_CE.shape[0]):
        part = slice(offsets[c], offsets[c + 1])
        least_C[c] = _least(load_CE[c], expert_H[part], rank_H[part], num_ranks)


@kernel
def _least(load_E: Any, expert_H: Any, rank_H: Any, num_ranks: Any) -> Any:
    """Raise a target from the mean to the densest closed set of ranks until loads can be levelled to it.

    From a rank above the target, load flows along hosts: an expert served on a can be served on b when b hosts it.
    Where no rank below the target is reached, what the reached ranks serve has no host elsewhere, so the target rises
    to their mean. It is a bound at every moment and is attained at the end.
    """
    by_rank, by_expert = _grouped(rank_H, num_ranks), _grouped(expert_H, len(load_E))
    served_H, load_G = np.zeros(len(rank_H), np.int64), np.zeros(num_ranks, np.int64)
    for e in range(len(load_E)):
        if load_E[e] > 0:
            if by_expert[1][e] == by_expert[1][e + 1]:
                return -1
            first = by_expert[0][by_expert[1][e]]
            served_H[first] = load_E[e]
            load_G[rank_H[first]] += load_E[e]
    target = -(-load_G.sum() // num_ranks)
    hosts = (expert_H, rank_H, by_rank, by_expert)
    entered = (np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64))
    queue = np.empty(num_ranks, np.int64)
    for source in range(num_ranks):
        while load_G[source] > target:
            reached, sink = _search(source, target, load_G, served_H, hosts, entered, queue)
            if sink < 0:
                inside = 0
                for i in range(reached):
                    inside += load_G[queue[i]]
                target = -(-inside // reached)
            else:
                _push(source, sink, target, load_G, served_H, rank_H, entered)
    return target


@kernel
def _grouped(key_H: Any, count: Any) -> Any:
    """Hosts in the order of a key, and where each key begins: int64 [H] and [count + 1]."""
    first = np.zeros(count + 1, np.int64)
    for h in range(len(key_H)):
        first[key_H[h] + 1] += 1
    for k in range(count):
        first[k + 1] += first[k]
    order, place = np.empty(len(key_H), np.int64), first.copy()
    for h in range(len(key_H)):
        order[place[key_H[h]]] = h
        place[key_H[h]] += 1
    return order, first


@kernel
def _search(source: Any, target: Any, load_G: Any, served_H: Any, hosts: Any, entered: Any, queue: Any) -> Any:
    """Breadth first to a rank below the target: how many were reached before it, and its number or -1.

    Rank b is entered by moving load from host `entered[0][b]` to host `entered[1][b]`.
    """
    expert_H, rank_H, by_rank, by_expert = hosts
    from_G, to_G = entered
    for g in range(len(from_G)):
        from_G[g] = -1
    queue[0], head, tail = source, 0, 1
    while head < tail:
        a = queue[head]
        head += 1
        for i in range(by_rank[1][a], by_rank[1][a + 1]):
            h = by_rank[0][i]
            if served_H[h] > 0:
                e = expert_H[h]
                for j in range(by_expert[1][e], by_expert[1][e + 1]):
                    other = by_expert[0][j]
                    b = rank_H[other]
                    if b != source and from_G[b] < 0:
                        from_G[b], to_G[b] = h, other
                        if load_G[b] < target:
                            return tail, b
                        queue[tail] = b
                        tail += 1
    return tail, -1


@kernel
def _push(source: Any, sink: Any, target: Any, load_G: Any, served_H: Any, rank_H: Any, entered: Any) -> None:
    from_G, to_G = entered
    amount = min(load_G[source] - target, target - load_G[sink])
    g = sink
    while g != source:
        amount = min(amount, served_H[from_G[g]])
        g = rank_H[from_G[g]]
    g = sink
    while g != source:
        served_H[from_G[g]] -= amount
        served_H[to_G[g]] += amount
        g = rank_H[from_G[g]]
    load_G[source] -= amount
    load_G[sink] += amount
