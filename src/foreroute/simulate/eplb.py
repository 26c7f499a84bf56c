"""EPLB: replicas and homes placed anew by total loads.

Every source splits its tokens evenly over the copies of an expert. Whoever runs EPLB decides which loads it plans from:
those of the step before, as in practice; those of this step, which a trace tells; or those of the very micro-step, with
all weights moving in every cell. It knows no cost of moving.

The placement is that of github.com/deepseek-ai/EPLB in its form without groups of experts: replicate whatever has the
largest load per copy, then pack the copies into ranks, from the heaviest down, each into the lightest rank that has
room. Ties go to the lower number, and loads are float32, as published, so that placements are equal to the published
ones, copy by copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.kernels import kernel
from foreroute.plan.hosts import CellPlan
from foreroute.simulate.balancers import BalancerInput, HeldExperts

Hosts = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
"""Expert, rank and copies there, of every host."""


def eplb_previous(problem: BalancerInput) -> Iterator[CellPlan]:
    """Placed once by the loads of the step before."""
    return _fixed(problem, problem.previous_loads_LE())


def eplb_step(problem: BalancerInput) -> Iterator[CellPlan]:
    """Placed once by the loads of this step."""
    return _fixed(problem, problem.loads_LE())


def eplb_micro_step(problem: BalancerInput) -> Iterator[CellPlan]:
    """Placed anew in every cell by its own loads."""
    held = HeldExperts(problem)
    for layer, counts_GE in problem.cells():
        expert_H, rank_H, copies_H = eplb_hosts(counts_GE.sum(axis=0), problem)
        yield held.host(layer, expert_H, rank_H, even_split(expert_H, copies_H, counts_GE))


def eplb_hosts(loads_E: NDArray[np.int64], problem: BalancerInput) -> Hosts:
    """The hosts of one layer. EPLB may put two copies of an expert on one rank; they are one host."""
    num_ranks, num_experts = problem.topology.num_ranks, len(loads_E)
    # the published algorithm fills every place, slots among them
    expert_P = eplb_placement(loads_E, problem.experts_per_rank * num_ranks, num_ranks)
    rank_P = np.arange(len(expert_P)) // problem.experts_per_rank
    host_P, copies_H = np.unique(expert_P * num_ranks + rank_P, return_counts=True)
    expert_H, rank_H = np.divmod(host_P, num_ranks)
    assert expert_H[-1] == num_experts - 1, "every expert has a copy"
    return expert_H.astype(np.int32), rank_H.astype(np.int32), copies_H.astype(np.int32)


def _fixed(problem: BalancerInput, loads_LE: NDArray[np.int64]) -> Iterator[CellPlan]:
    hosts_L = [eplb_hosts(loads_E, problem) for loads_E in loads_LE]
    held = HeldExperts(problem, rehomes=True)
    for layer, counts_GE in problem.cells():
        expert_H, rank_H, copies_H = hosts_L[layer]
        yield held.host(layer, expert_H, rank_H, even_split(expert_H, copies_H, counts_GE))


@kernel
def even_split(expert_H: Any, copies_H: Any, counts_GE: Any) -> Any:
    """int64 [H, G], each source's assignments divided over the copies of their expert; `expert_H` is ascending."""
    num_ranks, num_experts = counts_GE.shape
    first_E = np.searchsorted(expert_H, np.arange(num_experts + 1))
    tokens_HG = np.zeros((len(expert_H), num_ranks), np.int64)
    for e in range(num_experts):
        hosts = range(first_E[e], first_E[e + 1])
        copies = 0
        for h in hosts:
            copies += copies_H[h]
        if copies == 0:
            continue
        # remainders go round, so that the copies of an expert serve the same, give or take one
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


def eplb_placement(loads_E: NDArray[np.number], num_copies: int, num_ranks: int) -> NDArray[np.int64]:
    """int64 [num_copies], the logical expert in every place; rank g has the places g * num_copies / G and on."""
    expert_C, copies_E = _replicate(loads_E.astype(np.float32), num_copies)
    load_C = loads_E.astype(np.float32)[expert_C] / copies_E.astype(np.float32)[expert_C]
    expert_P = np.empty(num_copies, np.int64)
    expert_P[_pack(load_C, np.argsort(-load_C, kind="stable"), num_ranks)] = expert_C
    return expert_P


@kernel
def _replicate(loads_E: Any, num_copies: int) -> Any:
    """int64 [num_copies], the expert of each copy, one of each expert first, and int64 [E], copies of each."""
    num_experts = len(loads_E)
    copies_E = np.ones(num_experts, np.int64)
    expert_C = np.arange(num_copies)
    share_E = loads_E.copy()
    for c in range(num_experts, num_copies):
        e = share_E.argmax()
        expert_C[c] = e
        copies_E[e] += 1
        share_E[e] = loads_E[e] / np.float32(copies_E[e])
    return expert_C, copies_E


@kernel
def _pack(load_C: Any, heaviest_C: Any, num_ranks: int) -> Any:
    """int64 [C], the place of each copy, of which every rank has equally many; `heaviest_C` are copies in order."""
    room = len(load_C) // num_ranks
    # as published, which otherwise would order the copies by their load
    if room == 1:
        return np.arange(len(load_C))
    place_C = np.empty(len(load_C), np.int64)
    load_G, filled_G = np.zeros(num_ranks, np.float32), np.zeros(num_ranks, np.int64)
    for c in heaviest_C:
        lightest = -1
        for g in range(num_ranks):
            if filled_G[g] < room and (lightest < 0 or load_G[g] < load_G[lightest]):
                lightest = g
        place_C[c] = lightest * room + filled_G[lightest]
        filled_G[lightest] += 1
        load_G[lightest] += load_C[c]
    return place_C
