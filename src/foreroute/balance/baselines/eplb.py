"""EPLB: replicas and homes placed anew by total loads, every source split evenly over the copies.

Whoever runs EPLB decides which loads it sees: those of the step before, as in practice; those of this step, which a
trace tells; or those of the very micro-step, with all weights moving in every cell. It knows no cost of moving, and one
group without nodes is its usual form for models without grouped routing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from foreroute.balance.assignment import Assignment
from foreroute.balance.baselines.eplb_placement import eplb_placement
from foreroute.balance.baselines.levelling import level_quotas
from foreroute.balance.baselines.problem import Problem, Residence
from foreroute.balance.baselines.splits import even_split, split_by_quota

Hosts = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
"""Expert, rank and copies there, of every host."""


def eplb_previous(problem: Problem) -> Iterator[Assignment]:
    """Placed once by the loads of the step before."""
    return _fixed(problem, problem.previous_loads_LE())


def eplb_step(problem: Problem) -> Iterator[Assignment]:
    """Placed once by the loads of this step."""
    return _fixed(problem, problem.loads_LE())


def eplb_step_lp(problem: Problem) -> Iterator[Assignment]:
    """Placed once by the loads of this step; tokens are split as well as those copies allow, in every cell."""
    hosts_L = [eplb_hosts(loads_E, problem) for loads_E in problem.loads_LE()]
    residence = Residence(problem)
    node_G = problem.topology.node_G
    for layer, counts_GE in problem.cells():
        expert_H, rank_H, _ = hosts_L[layer]
        quota_H, _ = level_quotas(expert_H, rank_H, counts_GE.sum(axis=0), len(node_G))
        yield residence.host(layer, expert_H, rank_H, split_by_quota(expert_H, rank_H, quota_H, node_G, counts_GE))


def eplb_micro_step(problem: Problem) -> Iterator[Assignment]:
    """Placed anew in every cell by its own loads."""
    residence = Residence(problem)
    for layer, counts_GE in problem.cells():
        expert_H, rank_H, copies_H = eplb_hosts(counts_GE.sum(axis=0), problem)
        yield residence.host(layer, expert_H, rank_H, even_split(expert_H, copies_H, counts_GE))


def eplb_hosts(loads_E: NDArray[np.int64], problem: Problem) -> Hosts:
    """The hosts of one layer. EPLB may put two copies of an expert on one rank; they are one host."""
    num_ranks, num_experts = problem.topology.num_ranks, len(loads_E)
    expert_P = eplb_placement(loads_E, problem.slots * num_ranks, 1, 1, num_ranks)
    rank_P = np.arange(len(expert_P)) // problem.slots
    host_P, copies_H = np.unique(expert_P * num_ranks + rank_P, return_counts=True)
    expert_H, rank_H = np.divmod(host_P, num_ranks)
    assert expert_H[-1] == num_experts - 1, "every expert has a copy"
    return expert_H.astype(np.int32), rank_H.astype(np.int32), copies_H.astype(np.int32)


def _fixed(problem: Problem, loads_LE: NDArray[np.int64]) -> Iterator[Assignment]:
    hosts_L = [eplb_hosts(loads_E, problem) for loads_E in loads_LE]
    residence = Residence(problem)
    for layer, counts_GE in problem.cells():
        expert_H, rank_H, copies_H = hosts_L[layer]
        yield residence.host(layer, expert_H, rank_H, even_split(expert_H, copies_H, counts_GE))
