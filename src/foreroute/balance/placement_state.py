"""What home placement keeps of a layer while it searches, and what a swap changes. Compiled; loaded on first use.

`table_XM`, int32, has a row over the micro-steps for each expert, its load; for each rank, its surplus over the mean;
and for each node, the same. `cost_X` is the sum of what is above 0 in the rows of ranks and nodes. The objective is
twice the ranks' cost plus the nodes'. `sizes` is (E, G, ranks per node). (A tuple of arrays would read better, but
costs three times as much as the arithmetic when it is handed to a function.)

Counting in int32 lets a swap be priced in a few vector instructions; loads too large for it are halved to fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreroute.kernels import kernel

ZERO = np.int32(0)
LARGEST = 1 << 28
"""Of all loads of a layer together, in int32: the objective and its slopes are at most six times as much."""


@kernel
def copy_homes(source_E: Any, target_E: Any) -> None:
    """Compiles much faster than a slice assignment, which carries its error messages."""
    for e in range(len(source_E)):
        target_E[e] = source_E[e]


@kernel
def layer_loads(counts_MLGE: Any, layer: Any) -> Any:
    """int64 [E, M padded with zeros to whole vectors], summed over sources."""
    micro_steps, _, num_ranks, num_experts = counts_MLGE.shape
    load_EM = np.zeros((num_experts, (micro_steps + 15) // 16 * 16), np.int64)
    sum_E = np.empty(num_experts, np.int64)
    for m in range(micro_steps):
        sum_E[:] = 0
        for g in range(num_ranks):
            for e in range(num_experts):
                sum_E[e] += counts_MLGE[m, layer, g, e]
        for e in range(num_experts):
            load_EM[e, m] = sum_E[e]
    return load_EM


@kernel
def narrowed(exact_EM: Any) -> Any:
    """Loads in int32, halved until all together are at most `LARGEST`."""
    shift, total = 0, exact_EM.sum()
    while total >> shift > LARGEST:
        shift += 1
    return (exact_EM >> shift).astype(np.int32)


@kernel
def placement_table(load_EM: Any, home_E: Any, num_ranks: Any, ranks_per_node: Any) -> Any:
    """`table_XM` and `cost_X` of a placement."""
    num_experts, num_nodes = len(home_E), num_ranks // ranks_per_node
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
def objective(exact_EM: Any, home_E: Any, num_ranks: Any, ranks_per_node: Any) -> Any:
    """As above, in int64, of loads as they are."""
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
