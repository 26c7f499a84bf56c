"""The search for homes, one layer at a time: descent, annealing and a last sweep. Compiled; loaded on first use.

`table_XM`, int32, has a row over the micro-steps for each expert, its load; for each rank, its surplus over the mean;
and for each node, the same. `cost_X` is the sum of what is above 0 in the rows of ranks and nodes. The objective is
twice the ranks' cost plus the nodes'. `sizes` is (E, G, ranks per node). (A tuple of arrays would read better, but
costs three times as much as the arithmetic when it is handed to a function.)

Counting in int32 lets a swap be priced in a few vector instructions; loads too large for it are halved to fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreroute.kernels import kernel, next_below, next_unit

HOT, COLD = 0.5, 0.007
"""Temperature of the annealing at first, in mean changes by a random swap, and at last, in the first one: at first a
swap of mean loss is taken once in seven times (exp(-2)), at last hardly any that loses. Neither value is published."""
SAMPLED_SWAPS = 64
"""Random swaps whose mean change sets the temperature; it only scales it, so a rough mean will do."""
ZERO = np.int32(0)


@kernel
def place_layer(
    exact_EM: Any,
    load_EM: Any,
    sizes: Any,
    start_E: Any,
    max_moves: Any,
    few: Any,
    proposals: Any,
    seed: Any,
    home_E: Any,
) -> None:
    """Search for the home of every expert of one layer.

    Args:
        exact_EM: int64 [E, M], loads; the added micro-steps of `layer_loads` have none.
        load_EM: int32 [E, M], the same, halved to fit.
        sizes: E, G and ranks per node; the node part of the objective falls away when there is one node only.
        start_E: int16 [E], the homes to start from, as many experts on every rank.
        max_moves: most experts whose home may differ from `start_E`, at least 2.
        few: whether to take the best swap, one after the other, before annealing.
        proposals: of the annealing.
        seed: uint64.
        home_E: int16 [E], written.
    """
    copy_homes(start_E, home_E)
    table_XM, cost_X = placement_table(load_EM, home_E, sizes)
    if few:
        descend(table_XM, cost_X, sizes, start_E, max_moves, home_E)
    anneal(table_XM, cost_X, sizes, start_E, max_moves, proposals, seed, home_E)
    # The table follows the last swap that was tried, the homes went back to the best ones.
    table_XM, cost_X = placement_table(load_EM, home_E, sizes)
    sweep(table_XM, cost_X, sizes, start_E, max_moves, home_E)
    # Halved loads may have misled the search; the loads as they are decide.
    if objective(exact_EM, home_E, sizes) > objective(exact_EM, start_E, sizes):
        copy_homes(start_E, home_E)


@kernel
def descend(table_XM: Any, cost_X: Any, sizes: Any, start_E: Any, max_moves: Any, home_E: Any) -> None:
    """Take the best swap that the budget allows until none improves. Ties go to the lowest experts.

    The objective is convex in the loads, so its slope at the present ones bounds from below what a swap can change
    (`pull_EG`), and most swaps need no exact look.
    """
    num_experts = len(home_E)
    pull_EG = np.empty((num_experts, sizes[1]), np.int32)
    moves = _moved(home_E, start_E)
    # Invariant: at most `max_moves` experts are away from start_E. Each round lowers the objective, so it ends.
    while True:
        _pulls(table_XM, sizes, pull_EG)
        best, best_e, best_f = ZERO, -1, -1
        for e in range(num_experts):
            a = np.int64(home_E[e])
            for f in range(e + 1, num_experts):
                b = np.int64(home_E[f])
                bound = pull_EG[e, b] - pull_EG[e, a] + pull_EG[f, a] - pull_EG[f, b]
                if bound < best and a != b and moves + more_moves(start_E, e, f, a, b) <= max_moves:
                    change = swap_change(table_XM, cost_X, sizes, e, f, a, b)
                    if change < best:
                        best, best_e, best_f = change, e, f
        if best_e < 0:
            return
        moves += more_moves(start_E, best_e, best_f, home_E[best_e], home_E[best_f])
        swap(table_XM, cost_X, sizes, best_e, best_f, home_E)


@kernel
def _pulls(table_XM: Any, sizes: Any, pull_EG: Any) -> None:
    """Slope of the objective in the presence of each expert on each rank."""
    num_experts, num_ranks, ranks_per_node = sizes
    slope_M = np.empty(table_XM.shape[1], np.int32)
    for g in range(num_ranks):
        rank_M, node_M = table_XM[num_experts + g], table_XM[num_experts + num_ranks + g // ranks_per_node]
        for m in range(len(slope_M)):
            slope_M[m] = 2 * int(rank_M[m] > 0) + int(node_M[m] > 0)
        for e in range(num_experts):
            pull, load_M = ZERO, table_XM[e]
            for m in range(len(slope_M)):
                pull += load_M[m] * slope_M[m]
            pull_EG[e, g] = pull


@kernel
def anneal(
    table_XM: Any, cost_X: Any, sizes: Any, start_E: Any, max_moves: Any, proposals: Any, seed: Any, home_E: Any
) -> None:
    """Simulated annealing over swaps within the budget; ends at the best placement that it met.

    With the budget used up, a swap keeps to it when both experts are away from their start, or when one of them
    returns to it; such swaps are then proposed more often.
    """
    num_experts = len(home_E)
    stream = np.full(1, seed, np.uint64)
    members = _members(home_E, sizes[1])
    moved, position_E, moves = np.empty(num_experts, np.int32), np.full(num_experts, -1, np.int32), 0
    for e in range(num_experts):
        moves = _note_move(e, home_E[e] != start_E[e], moved, position_E, moves)
    heat = HOT * _typical_change(table_XM, cost_X, sizes, home_E, stream)
    cooling = COLD ** (1.0 / proposals)
    # Invariant: `now` is the objective of home_E by that of the beginning, `best` the least it was, at `best_E`;
    # moved[:moves] are the experts away from their start, and at most `max_moves`.
    now, best, best_E = 0, 0, home_E.copy()
    for _ in range(proposals):
        heat *= cooling
        e, f = _propose(stream, start_E, members[0], moved, moves, max_moves)
        a, b = np.int64(home_E[e]), np.int64(home_E[f])
        if a == b or moves + more_moves(start_E, e, f, a, b) > max_moves:
            continue
        change = swap_change(table_XM, cost_X, sizes, e, f, a, b)
        if change <= 0 or next_unit(stream) < np.exp(-change / heat):
            swap(table_XM, cost_X, sizes, e, f, home_E)
            _exchange_members(members, e, f, a, b)
            moves = _note_move(e, home_E[e] != start_E[e], moved, position_E, moves)
            moves = _note_move(f, home_E[f] != start_E[f], moved, position_E, moves)
            now += change
            if now < best:
                best = now
                copy_homes(home_E, best_E)
    copy_homes(best_E, home_E)


@kernel
def _propose(stream: Any, start_E: Any, member_GI: Any, moved: Any, moves: Any, max_moves: Any) -> Any:
    """Two experts to be swapped."""
    if moves + 2 <= max_moves:
        return next_below(stream, len(start_E)), next_below(stream, len(start_E))
    # The budget is used up: two random experts would nearly always break it. One that is away goes with another that is
    # away, back to its start, or (for there may be better than either) with any.
    e, choice = np.int64(moved[next_below(stream, moves)]), next_below(stream, 3)
    if choice == 0:
        return e, np.int64(moved[next_below(stream, moves)])
    if choice == 1:
        return e, np.int64(member_GI[start_E[e], next_below(stream, member_GI.shape[1])])
    return e, next_below(stream, len(start_E))


@kernel
def _note_move(e: Any, away: Any, moved: Any, position_E: Any, moves: Any) -> Any:
    """Keep the list of experts away from their start; returns its length."""
    if away and position_E[e] < 0:
        moved[moves], position_E[e] = e, moves
        return moves + 1
    if not away and position_E[e] >= 0:
        last = moved[moves - 1]  # fills the gap
        moved[position_E[e]], position_E[last] = last, position_E[e]
        position_E[e] = -1
        return moves - 1
    return moves


@kernel
def _members(home_E: Any, num_ranks: Any) -> Any:
    """The experts of each rank, int32 [G, E / G], and the position of each expert among them, int32 [E]."""
    member_GI = np.empty((num_ranks, len(home_E) // num_ranks), np.int32)
    member_E, filled_G = np.empty(len(home_E), np.int32), np.zeros(num_ranks, np.int32)
    for e in range(len(home_E)):
        g = home_E[e]
        member_E[e], member_GI[g, filled_G[g]] = filled_G[g], e
        filled_G[g] += 1
    return member_GI, member_E


@kernel
def _exchange_members(members: Any, e: Any, f: Any, a: Any, b: Any) -> None:
    member_GI, member_E = members
    member_GI[a, member_E[e]], member_GI[b, member_E[f]] = f, e
    member_E[e], member_E[f] = member_E[f], member_E[e]


@kernel
def _typical_change(table_XM: Any, cost_X: Any, sizes: Any, home_E: Any, stream: Any) -> float:
    """Mean size of the change by a random swap."""
    total = 0.0
    for _ in range(SAMPLED_SWAPS):
        e, f = next_below(stream, len(home_E)), next_below(stream, len(home_E))
        if home_E[e] != home_E[f]:
            total += abs(swap_change(table_XM, cost_X, sizes, e, f, np.int64(home_E[e]), np.int64(home_E[f])))
    return max(total / SAMPLED_SWAPS, 1.0)


@kernel
def sweep(table_XM: Any, cost_X: Any, sizes: Any, start_E: Any, max_moves: Any, home_E: Any) -> None:
    """Give every expert in turn its best swap that the budget allows, where one improves."""
    num_experts = len(home_E)
    moves = _moved(home_E, start_E)
    # Annealing ends at the best placement that it met, which nothing was tried on since: some swaps may still improve.
    # One pass over the experts, each swap within the budget.
    for e in range(num_experts):
        best, best_f = ZERO, -1
        a = np.int64(home_E[e])
        for f in range(num_experts):
            b = np.int64(home_E[f])
            if a != b and moves + more_moves(start_E, e, f, a, b) <= max_moves:
                change = swap_change(table_XM, cost_X, sizes, e, f, a, b)
                if change < best:
                    best, best_f = change, f
        if best_f >= 0:
            moves += more_moves(start_E, e, best_f, home_E[e], home_E[best_f])
            swap(table_XM, cost_X, sizes, e, best_f, home_E)


@kernel
def _moved(home_E: Any, start_E: Any) -> Any:
    """How many experts are away from their start."""
    moves = 0
    for e in range(len(home_E)):
        moves += int(home_E[e] != start_E[e])
    return moves


@kernel
def copy_homes(source_E: Any, target_E: Any) -> None:
    """Compiles much faster than a slice assignment, which carries its error messages."""
    for e in range(len(source_E)):
        target_E[e] = source_E[e]


@kernel
def placement_table(load_EM: Any, home_E: Any, sizes: Any) -> Any:
    """`table_XM` and `cost_X` of a placement."""
    num_experts, num_ranks, ranks_per_node = sizes
    num_nodes = num_ranks // ranks_per_node
    table_XM = np.zeros((num_experts + num_ranks + num_nodes, load_EM.shape[1]), np.int32)
    for e in range(num_experts):
        for m in range(load_EM.shape[1]):
            table_XM[e, m] = load_EM[e, m]
    _add_surplus(load_EM, home_E, num_ranks, 1, table_XM, num_experts)
    _add_surplus(load_EM, home_E, num_nodes, ranks_per_node, table_XM, num_experts + num_ranks)
    cost_X = np.zeros(len(table_XM), np.int32)
    for x in range(num_experts, len(table_XM)):
        for m in range(table_XM.shape[1]):
            cost_X[x] += max(table_XM[x, m], ZERO)
    return table_XM, cost_X


@kernel
def objective(exact_EM: Any, home_E: Any, sizes: Any) -> Any:
    """As above, in int64, of loads as they are."""
    _, num_ranks, ranks_per_node = sizes
    num_nodes = num_ranks // ranks_per_node
    over_XM = np.zeros((num_ranks + num_nodes, exact_EM.shape[1]), np.int64)
    _add_surplus(exact_EM, home_E, num_ranks, 1, over_XM, 0)
    _add_surplus(exact_EM, home_E, num_nodes, ranks_per_node, over_XM, num_ranks)
    total = 0
    for x in range(len(over_XM)):
        for m in range(over_XM.shape[1]):
            total += max(over_XM[x, m], 0) * (2 if x < num_ranks else 1)
    return total


@kernel
def _add_surplus(load_EM: Any, home_E: Any, num_places: Any, ranks_per_place: Any, over_XM: Any, first: Any) -> None:
    """Load of each rank or node minus the mean, rounded down, added to the rows from `first` on."""
    for e in range(len(home_E)):
        place = first + home_E[e] // ranks_per_place
        for m in range(load_EM.shape[1]):
            over_XM[place, m] += load_EM[e, m]
    # All places lose the same, so that comparisons hold though the mean is rounded.
    for m in range(load_EM.shape[1]):
        total = 0
        for place in range(first, first + num_places):
            total += over_XM[place, m]
        for place in range(first, first + num_places):
            over_XM[place, m] -= total // num_places


@kernel
def swap_change(table_XM: Any, cost_X: Any, sizes: Any, e: Any, f: Any, a: Any, b: Any) -> Any:
    """Change of the objective by the swap of e on rank a with f on rank b."""
    num_experts, num_ranks, ranks_per_node = sizes
    change = 2 * _exchanged(table_XM, cost_X, e, f, num_experts + a, num_experts + b)
    u, v = a // ranks_per_node, b // ranks_per_node
    if u != v:
        nodes = num_experts + num_ranks
        change += _exchanged(table_XM, cost_X, e, f, nodes + u, nodes + v)
    return change


@kernel
def _exchanged(table_XM: Any, cost_X: Any, e: Any, f: Any, x: Any, y: Any) -> Any:
    """Change of the cost of rows x and y when e leaves x for y and f leaves y for x."""
    total = ZERO
    e_M, f_M, x_M, y_M = table_XM[e], table_XM[f], table_XM[x], table_XM[y]
    for m in range(len(e_M)):
        moved = e_M[m] - f_M[m]
        total += max(x_M[m] - moved, ZERO) + max(y_M[m] + moved, ZERO)
    return total - cost_X[x] - cost_X[y]


@kernel
def swap(table_XM: Any, cost_X: Any, sizes: Any, e: Any, f: Any, home_E: Any) -> None:
    """Exchange the homes of e and f."""
    num_experts, num_ranks, ranks_per_node = sizes
    a, b = np.int64(home_E[e]), np.int64(home_E[f])
    home_E[e], home_E[f] = b, a
    _shift(table_XM, cost_X, e, f, num_experts + a, num_experts + b)
    if a // ranks_per_node != b // ranks_per_node:
        nodes = num_experts + num_ranks
        _shift(table_XM, cost_X, e, f, nodes + a // ranks_per_node, nodes + b // ranks_per_node)


@kernel
def _shift(table_XM: Any, cost_X: Any, e: Any, f: Any, x: Any, y: Any) -> None:
    """Let e leave row x for y and f leave y for x; costs stay the sums of what is above 0."""
    cost_X[x], cost_X[y] = ZERO, ZERO
    for m in range(table_XM.shape[1]):
        moved = table_XM[e, m] - table_XM[f, m]
        table_XM[x, m] -= moved
        table_XM[y, m] += moved
        cost_X[x] += max(table_XM[x, m], ZERO)
        cost_X[y] += max(table_XM[y, m], ZERO)


@kernel
def more_moves(start_E: Any, e: Any, f: Any, a: Any, b: Any) -> Any:
    """By how much the swap of e on a with f on b changes the number of experts away from their start."""
    return int(start_E[e] == a) - int(start_E[e] == b) + int(start_E[f] == b) - int(start_E[f] == a)
