"""FEPLB-style: inside each node, whole experts are lent in every cell to ranks with less to do.

After FEPLB (arXiv 2604.19654): tokens are dispatched to the homes as usual; then the tokens and the weights of some
experts are copied on to other ranks of the same node over the fast link. Here a rank borrows no more experts than it
has redundant slots. The slots are refilled in every cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from foreroute.balance.assignment import Assignment
from foreroute.balance.baselines.problem import Problem, Residence
from foreroute.kernels import kernel


def feplb_style(problem: Problem) -> Iterator[Assignment]:
    """Experts lent anew in every cell, by its own loads."""
    residence = Residence(problem)
    expert_H = np.arange(problem.num_experts, dtype=np.int32)
    for layer, counts_GE in problem.cells():
        home_E = problem.home_LE[layer]
        rank_E = lend(counts_GE.sum(axis=0), home_E, problem.topology.node_G, problem.topology.redundant_slots)
        residence.clear(layer, home_E)
        yield residence.host(layer, expert_H, rank_E, counts_GE.T.copy())


@kernel
def lend(loads_E: Any, home_E: Any, node_G: Any, slots: int) -> Any:
    """int32 [E], the rank that serves each expert.

    From the heaviest rank of a node on, that expert goes to that rank of the node which makes the larger load of the
    two smallest, until no rank gains.

    Args:
        loads_E: int64 [E].
        home_E: int16 [E].
        node_G: int16 [G].
        slots: experts that a rank can borrow.
    """
    num_ranks, num_experts = len(node_G), len(loads_E)
    rank_E = home_E.astype(np.int32)
    load_G, borrowed_G = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for e in range(num_experts):
        load_G[rank_E[e]] += loads_E[e]
    stuck_G = np.zeros(num_ranks, np.bool_)
    while not stuck_G.all():
        a = -1
        for g in range(num_ranks):
            if not stuck_G[g] and (a < 0 or load_G[g] > load_G[a]):
                a = g
        best, expert, to = load_G[a], -1, -1
        for e in range(num_experts):
            if rank_E[e] != a or home_E[e] != a:
                continue
            for b in range(num_ranks):
                if b != a and node_G[b] == node_G[a] and borrowed_G[b] < slots:
                    larger = max(load_G[a] - loads_E[e], load_G[b] + loads_E[e])
                    if larger < best:
                        best, expert, to = larger, e, b
        if expert < 0:
            stuck_G[a] = True
            continue
        rank_E[expert] = to
        borrowed_G[to] += 1
        load_G[a] -= loads_E[expert]
        load_G[to] += loads_E[expert]
    return rank_E
