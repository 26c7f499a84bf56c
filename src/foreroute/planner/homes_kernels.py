"""The search for homes, one layer at a time: descent, annealing and a last sweep. Compiled; loaded on first use.

The objective is twice the surplus of all ranks over their mean, in every micro-step, plus that of all nodes. Counting
in int32 lets a swap be priced in a few vector instructions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.kernels import NONE, inlined, kernel, next_below, next_unit
from foreroute.plan.topology import Topology

HOT, COLD = 0.5, 0.007
"""Temperature of the annealing at first, in mean changes by a random swap, and at last, in the first one: at first a
swap of mean loss is taken once in seven times (exp(-2)), at last hardly any that loses. Neither value is published."""
SAMPLED_SWAPS = 64
"""Random swaps whose mean change sets the temperature; it only scales it, so a rough mean will do."""
ZERO = np.int32(0)
Ints = NDArray[np.int64]


class Placement(NamedTuple):
    """Homes of one layer, and what follows from them. Swaps keep all of it in step.

    Attributes:
        table_XM: int32 [E + G + N, M], a row for each expert, its load; for each rank, its surplus over the mean, below
            0 where it has less; and for each node, the same.
        cost_X: int32 [E + G + N], the sum of what is above 0 in the rows of ranks and nodes.
        home_E: int64 [E].
        start_E: int64 [E], the homes that the budget counts from.
        member_GI: int64 [G, E / G], the experts of each rank.
        member_E: int64 [E], the position of each expert among them.
        moved_E: int64 [E], the experts away from their start come first.
        moved_at_E: int64 [E], the position of each of them there, -1 of others.
        moves: int64 [1], how many they are.
        best_E: int64 [E], room for the best homes that the annealing meets.
        max_moves: most experts that may be away from their start, at least 2.
        ranks_per_node: of the topology.
    """

    table_XM: NDArray[np.int32]
    cost_X: NDArray[np.int32]
    home_E: Ints
    start_E: Ints
    member_GI: Ints
    member_E: Ints
    moved_E: Ints
    moved_at_E: Ints
    moves: Ints
    best_E: Ints
    max_moves: int
    ranks_per_node: int


def new_placement(
    load_EM: NDArray[np.int32], home_E: Ints, start_E: Ints, topology: Topology, budget: int
) -> Placement:
    """The state of these homes; `home_E` is copied."""
    num_experts, num_ranks = len(home_E), topology.num_ranks
    table_XM = np.concatenate([load_EM, _surpluses(load_EM, home_E, topology)]).astype(np.int32)
    cost_X = np.maximum(table_XM, 0).sum(axis=1, dtype=np.int32)
    by_rank = np.argsort(home_E, kind="stable")
    member_E, moved_E, moved_at_E = np.full((3, num_experts), -1)
    member_E[by_rank] = np.arange(num_experts) % (num_experts // num_ranks)
    away = np.flatnonzero(home_E != start_E)
    moved_E[: len(away)] = away
    moved_at_E[away] = np.arange(len(away))
    return Placement(
        table_XM,
        cost_X,
        home_E.copy(),
        start_E,
        by_rank.reshape(num_ranks, -1),
        member_E,
        moved_E,
        moved_at_E,
        np.array([len(away)]),
        home_E.copy(),
        budget,
        topology.ranks_per_node,
    )


def objective(load_EM: Ints, home_E: Ints, topology: Topology) -> int:
    """What is lowered."""
    cost_X = np.maximum(_surpluses(load_EM, home_E, topology), 0).sum(axis=1)
    return int(2 * cost_X[: topology.num_ranks].sum() + cost_X[topology.num_ranks :].sum())


def _surpluses(load_EM: NDArray[np.integer], home_E: Ints, topology: Topology) -> Ints:
    """int64 [G + N, M], load of each rank and node minus their mean, rounded down."""
    # All places lose the same, so comparisons hold though the mean is rounded.
    by_rank = load_EM[np.argsort(home_E)].astype(np.int64).reshape(topology.num_ranks, -1, load_EM.shape[1])
    load_GM = by_rank.sum(axis=1)
    load_NM = load_GM.reshape(topology.num_nodes, topology.ranks_per_node, -1).sum(axis=1)
    return np.concatenate([load - load.sum(axis=0) // len(load) for load in (load_GM, load_NM)])


@kernel(_nrt=False)
def descend(now: Placement, pull_EG: NDArray[np.int32]) -> None:
    """Take the best swap that the budget allows until none improves. Ties go to the lowest experts.

    `pull_EG`, int32 [E, G], is scratch: the slope of the objective in the presence of each expert on each rank. The
    objective is convex in the loads, so its slope bounds what a swap can change, and most swaps need no exact look.
    """
    # Invariant: at most `max_moves` experts are away from their start. Each round lowers the objective, so it ends.
    while True:
        _pulls(now, pull_EG)
        best, best_e, best_f = 0, NONE, NONE
        for e in range(len(now.home_E)):
            for f in range(e + 1, len(now.home_E)):
                a, b = now.home_E[e], now.home_E[f]
                bound = pull_EG[e, b] - pull_EG[e, a] + pull_EG[f, a] - pull_EG[f, b]
                if bound < best and _allowed(now, e, f):
                    change = _swap_change(now, e, f)
                    if change < best:
                        best, best_e, best_f = change, e, f
        if best_e == NONE:
            return
        _swap(now, best_e, best_f)


@inlined
def _pulls(now: Placement, pull_EG: NDArray[np.int32]) -> None:
    num_experts, num_ranks = pull_EG.shape
    for g in range(num_ranks):
        rank_M = now.table_XM[num_experts + g]
        node_M = now.table_XM[num_experts + num_ranks + g // now.ranks_per_node]
        for e in range(num_experts):
            pull, load_M = ZERO, now.table_XM[e]
            for m in range(len(load_M)):
                pull += load_M[m] * (2 * int(rank_M[m] > 0) + int(node_M[m] > 0))
            pull_EG[e, g] = pull


@kernel(_nrt=False)
def anneal(now: Placement, proposals: int, random: NDArray[np.uint64]) -> None:
    """Simulated annealing over swaps within the budget; `home_E` ends as the best that it met.

    With the budget used up, a swap keeps to it when both experts are away from their start, or when one of them
    returns to it; such swaps are then proposed more often.
    """
    heat = HOT * _typical_change(now, random)
    cooling = COLD ** (1.0 / proposals)
    # Invariant: `total` is by how much the objective of home_E has changed, `best` the least it was, at `best_E`.
    total, best = 0, 0
    for _ in range(proposals):
        heat *= cooling
        e, f = _propose(now, random)
        if not _allowed(now, e, f):
            continue
        change = _swap_change(now, e, f)
        if change <= 0 or next_unit(random) < np.exp(-change / heat):
            _swap(now, e, f)
            total += change
            if total < best:
                best = total
                for i in range(len(now.home_E)):
                    now.best_E[i] = now.home_E[i]
    # the rest of the state stays that of the last swap
    for i in range(len(now.home_E)):
        now.home_E[i] = now.best_E[i]


@inlined
def _propose(now: Placement, random: NDArray[np.uint64]) -> tuple[int, int]:
    """Two experts to be swapped."""
    num_experts, moves = len(now.home_E), now.moves[0]
    if moves + 2 <= now.max_moves:
        return next_below(random, num_experts), next_below(random, num_experts)
    # The budget is used up: two random experts would nearly always break it. One that is away goes with another that is
    # away, back to its start, or (for there may be better than either) with any.
    e, choice = now.moved_E[next_below(random, moves)], next_below(random, 3)
    if choice == 0:
        return e, now.moved_E[next_below(random, moves)]
    if choice == 1:
        return e, now.member_GI[now.start_E[e], next_below(random, now.member_GI.shape[1])]
    return e, next_below(random, num_experts)


@inlined
def _typical_change(now: Placement, random: NDArray[np.uint64]) -> float:
    """Mean size of the change by a random swap."""
    total = 0.0
    for _ in range(SAMPLED_SWAPS):
        e, f = next_below(random, len(now.home_E)), next_below(random, len(now.home_E))
        if now.home_E[e] != now.home_E[f]:
            total += abs(_swap_change(now, e, f))
    return max(total / SAMPLED_SWAPS, 1.0)


@kernel(_nrt=False)
def sweep(now: Placement) -> None:
    """Give every expert in turn its best swap that the budget allows, where one improves."""
    # Annealing ends at the best placement that it met, which nothing was tried on since: some swaps may still improve.
    for e in range(len(now.home_E)):
        best, best_f = 0, NONE
        for f in range(len(now.home_E)):
            if _allowed(now, e, f):
                change = _swap_change(now, e, f)
                if change < best:
                    best, best_f = change, f
        if best_f != NONE:
            _swap(now, e, best_f)


@inlined
def _allowed(now: Placement, e: int, f: int) -> bool:
    """Whether the swap of e with f is one, and within the budget."""
    a, b = now.home_E[e], now.home_E[f]
    more = int(now.start_E[e] == a) - int(now.start_E[e] == b) + int(now.start_E[f] == b) - int(now.start_E[f] == a)
    return bool(a != b and now.moves[0] + more <= now.max_moves)


@inlined
def _swap_change(now: Placement, e: int, f: int) -> int:
    """Change of the objective by the swap of e with f, which live on different ranks."""
    num_experts, num_ranks = len(now.home_E), len(now.member_GI)
    a, b = now.home_E[e], now.home_E[f]
    change = 2 * _exchanged(now, e, f, num_experts + a, num_experts + b)
    u, v = a // now.ranks_per_node, b // now.ranks_per_node
    if u != v:
        nodes = num_experts + num_ranks
        change += _exchanged(now, e, f, nodes + u, nodes + v)
    return change


@inlined
def _exchanged(now: Placement, e: int, f: int, x: int, y: int) -> int:
    """Change of the cost of rows x and y when e leaves x for y and f leaves y for x."""
    total = ZERO
    e_M, f_M, x_M, y_M = now.table_XM[e], now.table_XM[f], now.table_XM[x], now.table_XM[y]
    for m in range(len(e_M)):
        moved = e_M[m] - f_M[m]
        total += max(x_M[m] - moved, ZERO) + max(y_M[m] + moved, ZERO)
    return int(total - now.cost_X[x] - now.cost_X[y])


@inlined
def _swap(now: Placement, e: int, f: int) -> None:
    """Exchange the homes of e and f."""
    num_experts, num_ranks = len(now.home_E), len(now.member_GI)
    a, b = now.home_E[e], now.home_E[f]
    u, v = a // now.ranks_per_node, b // now.ranks_per_node
    _shift(now, e, f, num_experts + a, num_experts + b)
    if u != v:
        nodes = num_experts + num_ranks
        _shift(now, e, f, nodes + u, nodes + v)
    i, j = now.member_E[e], now.member_E[f]
    now.home_E[e], now.home_E[f] = b, a
    now.member_E[e], now.member_E[f] = j, i
    now.member_GI[a, i], now.member_GI[b, j] = f, e
    _note_move(now, e)
    _note_move(now, f)


@inlined
def _shift(now: Placement, e: int, f: int, x: int, y: int) -> None:
    """Let e leave row x for y and f leave y for x."""
    e_M, f_M, x_M, y_M = now.table_XM[e], now.table_XM[f], now.table_XM[x], now.table_XM[y]
    x_cost, y_cost = ZERO, ZERO
    for m in range(len(e_M)):
        moved = e_M[m] - f_M[m]
        x_M[m] -= moved
        y_M[m] += moved
        x_cost += max(x_M[m], ZERO)
        y_cost += max(y_M[m], ZERO)
    now.cost_X[x], now.cost_X[y] = x_cost, y_cost


@inlined
def _note_move(now: Placement, e: int) -> None:
    """Keep the list of experts away from their start."""
    away, at = now.home_E[e] != now.start_E[e], now.moved_at_E[e]
    if away and at < 0:
        now.moved_E[now.moves[0]], now.moved_at_E[e] = e, now.moves[0]
        now.moves[0] += 1
    elif not away and at >= 0:
        now.moves[0] -= 1
        last = now.moved_E[now.moves[0]]  # fills the gap
        now.moved_E[at], now.moved_at_E[last] = last, at
        now.moved_at_E[e] = -1
