"""LLEP: tokens above a rank's capacity go, with the weights of their experts, to the ranks that have least.

After Least-Loaded Expert Parallelism (arXiv 2601.17111) and its public code
(github.com/SalesforceAIResearch/LeastLoadedEP, Apache 2.0). Experts are taken from the heaviest down. The home of an
expert keeps what its capacity leaves beside its other experts; the rest goes to the ranks with the least load, those of
their own experts that are still to come included. Here the capacity is the mean load and no part is too small to be
sent (the published defaults are 1.1 times the mean and 1,024 tokens), which balances best. A rank borrows no more
experts than it has redundant slots; the public code has no such limit, and is had with a slot for every expert. The
slots are refilled in every cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import njit

from foreroute.plan.hosts import CellPlan
from foreroute.simulate.balancers import BalancerInput, HeldExperts


def llep(problem: BalancerInput) -> Iterator[CellPlan]:
    """Spilled anew in every cell, by its own loads."""
    held = HeldExperts(problem)
    for layer, counts_GE in problem.cells():
        home_E = problem.home_LE[layer]
        held.clear(layer)
        yield held.host(layer, *least_loaded(counts_GE, home_E, problem.topology.redundant_slots))


@njit(cache=True, nogil=True)
def least_loaded(counts_GE: Any, home_E: Any, slots: int) -> Any:
    """Hosts and tokens, int32 [H], int32 [H], int64 [H, G]: all homes, then the ranks that tokens are spilled to."""
    num_ranks, num_experts = counts_GE.shape
    loads_E = counts_GE.sum(axis=0)
    capacity = (loads_E.sum() + num_ranks - 1) // num_ranks
    most = num_experts + num_ranks * slots
    expert_H, rank_H = np.empty(most, np.int32), np.empty(most, np.int32)
    quota_H = np.zeros(most, np.int64)
    load_G = np.zeros(num_ranks, np.int64)  # what is assigned, and what the homes of experts to come have
    room_G = np.full(num_ranks, slots)
    for e in range(num_experts):
        expert_H[e], rank_H[e] = e, home_E[e]
        load_G[home_E[e]] += loads_E[e]
    size = num_experts
    for e in np.argsort(-loads_E, kind="mergesort"):
        # from now on its load is what is assigned, no longer what is to come
        a = home_E[e]
        load_G[a] -= loads_E[e]
        kept = min(max(capacity - load_G[a], 0), loads_E[e])
        left = loads_E[e] - kept
        while left > 0:
            b = -1
            for g in range(num_ranks):
                if g != a and room_G[g] > 0 and (b < 0 or load_G[g] < load_G[b]):
                    b = g
            if b < 0 or load_G[b] >= capacity:  # no slot is free where there is capacity
                kept += left
                break
            part = min(left, capacity - load_G[b])
            expert_H[size], rank_H[size], quota_H[size] = e, b, part
            size += 1
            load_G[b] += part
            room_G[b] -= 1
            left -= part
        load_G[a] += kept
        quota_H[e] = kept
    return expert_H[:size], rank_H[:size], in_order(expert_H[:size], quota_H, counts_GE)


@njit(cache=True, nogil=True)
def in_order(expert_H: Any, quota_H: Any, counts_GE: Any) -> Any:
    """int64 [H, G]: an expert's hosts take its tokens one after the other, in the order of the sources."""
    num_ranks = len(counts_GE)
    tokens_HG = np.zeros((len(expert_H), num_ranks), np.int64)
    rest_GE = counts_GE.copy()
    for h in range(len(expert_H)):
        wanted = quota_H[h]
        for g in range(num_ranks):
            taken = min(wanted, rest_GE[g, expert_H[h]])
            tokens_HG[h, g] = taken
            rest_GE[g, expert_H[h]] -= taken
            wanted -= taken
    return tokens_HG
