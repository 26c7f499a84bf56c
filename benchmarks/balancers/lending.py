"""Balancers that lend whole experts in every cell and keep the homes: FasterMoE-style and FEPLB-style.

After FasterMoE (He et al., PPoPP 2022): the hottest experts are copied to all ranks (shadowed), each of which serves
its own tokens, from the hottest down as long as the slowest rank gains more than the copies cost. Here a rank shadows
no more experts than it has redundant slots, and what is shadowed already costs nothing.

After FEPLB (arXiv 2604.19654): tokens are dispatched to the homes as usual; then the tokens and the weights of some
experts are copied on to other ranks of the same node over the fast link. Here a rank borrows no more experts than it
has redundant slots. The slots are refilled in every cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.kernels import kernel
from foreroute.plan.hosts import CellPlan
from foreroute.simulate.balancers import BalancerInput, HeldExperts


def fastermoe_style(problem: BalancerInput) -> Iterator[CellPlan]:
    """Shadows chosen anew in every cell, by its own loads."""
    held = HeldExperts(problem)
    held_LE = np.zeros(problem.home_LE.shape, np.bool_)
    for layer, counts_GE in problem.cells():
        home_E = problem.home_LE[layer]
        chosen = _shadows(counts_GE, home_E, held_LE[layer], problem)
        held_LE[layer] = False
        held_LE[layer, chosen] = True
        yield held.host(layer, *_hosts(counts_GE, home_E, chosen))


def _shadows(
    counts_GE: NDArray[np.int64], home_E: NDArray[np.int16], held_E: NDArray[np.bool_], problem: BalancerInput
) -> list[int]:
    """Experts to shadow: the prefix of the hottest ones with the least time for slowest rank and copies together."""
    loads_E = counts_GE.sum(axis=0)
    load_G = np.zeros(len(counts_GE), np.int64)
    np.add.at(load_G, home_E, loads_E)
    hottest: list[int] = np.argsort(-loads_E, kind="stable")[: problem.topology.redundant_slots].tolist()
    best, cost = 0, load_G.max() * problem.assignment_s
    copies = 0
    for number, expert in enumerate(hottest, start=1):
        load_G[home_E[expert]] -= loads_E[expert]
        load_G += counts_GE[:, expert]
        copies += not held_E[expert]
        seconds = load_G.max() * problem.assignment_s + copies * problem.transfer_s
        if seconds < cost:
            best, cost = number, seconds
    return hottest[:best]


def _hosts(
    counts_GE: NDArray[np.int64], home_E: NDArray[np.int16], chosen: list[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    num_ranks, num_experts = counts_GE.shape
    expert_H, rank_H, tokens = [np.arange(num_experts)], [home_E.astype(np.int64)], [counts_GE.T.copy()]
    for expert in chosen:
        others = np.flatnonzero(np.arange(num_ranks) != home_E[expert])
        kept = tokens[0][expert, home_E[expert]]
        tokens[0][expert] = 0
        tokens[0][expert, home_E[expert]] = kept
        served = np.zeros((len(others), num_ranks), np.int64)
        served[np.arange(len(others)), others] = counts_GE[others, expert]
        expert_H.append(np.full(len(others), expert))
        rank_H.append(others)
        tokens.append(served)
    return np.concatenate(expert_H).astype(np.int32), np.concatenate(rank_H).astype(np.int32), np.concatenate(tokens)


def feplb_style(problem: BalancerInput) -> Iterator[CellPlan]:
    """Experts lent anew in every cell, by its own loads."""
    held = HeldExperts(problem)
    expert_H = np.arange(problem.num_experts, dtype=np.int32)
    for layer, counts_GE in problem.cells():
        home_E = problem.home_LE[layer]
        rank_E = lend(counts_GE.sum(axis=0), home_E, problem.topology.node_G, problem.topology.redundant_slots)
        held.clear(layer)
        yield held.host(layer, expert_H, rank_E, counts_GE.T.copy())


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
