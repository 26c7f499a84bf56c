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

import numpy as np
from numpy.typing import NDArray

from foreroute.kernels import INT, ArrayOf, compiled
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


def even_split(
    expert_H: NDArray[np.int32], copies_H: NDArray[np.int32], counts_GE: NDArray[np.int64]
) -> NDArray[np.int64]:
    """int64 [H, G], each source's assignments divided over the copies of their expert; `expert_H` is ascending."""
    tokens_HG = np.empty((len(expert_H), len(counts_GE)), np.int64)
    _split_evenly(expert_H, copies_H, counts_GE, tokens_HG)
    return tokens_HG


def eplb_placement(loads_E: NDArray[np.number], num_copies: int, num_ranks: int) -> NDArray[np.int64]:
    """int64 [num_copies], the logical expert in every place; rank g has the places g * num_copies / G and on."""
    expert_P = np.empty(num_copies, np.int64)
    _place_copies(loads_E.astype(np.float32), num_ranks, expert_P)
    return expert_P


_split_evenly = compiled(
    "split_evenly",
    ArrayOf(np.int32, 1),
    ArrayOf(np.int32, 1),
    ArrayOf(np.int64, 2),
    ArrayOf(np.int64, 2, filled=True),
)
_place_copies = compiled("place_copies", ArrayOf(np.float32, 1), INT, ArrayOf(np.int64, 1, filled=True))
