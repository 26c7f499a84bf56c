"""How far to go with traffic-aware replication in one cell, by the cost model. Compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from foreroute.balance import pricing
from foreroute.balance.pricing import cell_seconds, rows_sent
from foreroute.balance.traffic_kernels import choose_hosted, serve_locally, split_by_distance
from foreroute.kernels import kernel

NO_LIMIT = 1 << 30
WORTH = 1e-3  # a plan that saves less than this share of a cell's seconds is not worth its transfers
_EXPOSED = pricing.EXPOSED
_ATTENTION, _EXPERTS, _FIXED = pricing.ATTENTION, pricing.EXPERTS, pricing.FIXED
# Factors of (replicas of a rank, copies of a home rank's experts): around the estimate of what is hidden, then on.
_TOGETHER = np.array([[1.0, 1.0], [1.5, 1.5], [0.67, 0.67]])
_APART = np.array([[0.75, 1.0], [1.33, 1.0], [1.0, 0.75], [1.0, 1.33]])


class Cell(NamedTuple):
    """What the search knows of a cell.

    Attributes:
        counts_GE: int64.
        demand_NE: int64, of the ranks of each node together.
        order_X: int64, the flat indices of `demand_NE`, most wanted first.
        home_E: int64, homes.
        first_NE: bool, what nodes must host.
        target: most assignments that a rank should serve.
        attention_s: of `slowest_attention`.
        prices: the cost model.
    """

    counts_GE: Any
    demand_NE: Any
    order_X: Any
    home_E: Any
    first_NE: Any
    target: int
    attention_s: Any
    prices: Any


class Found(NamedTuple):
    """A plan: its parameters, the loads of its hosts (int64 [G, E]), its seconds, and these by stage and part."""

    slots: int
    copies: int
    served_GE: Any
    seconds: float
    parts_SP: Any


@kernel
def search_cell(
    counts_GE: Any, home_E: Any, base_NE: Any, base_s: float, slots: int, target: int, attention_s: Any, prices: Any
) -> Any:
    """The loads of the fastest plan found, int64 [G, E], and its seconds. Without a better one, no loads and `base_s`.

    First come as many replicas as fit. Where their transfers expose time, other numbers are tried, first about as many
    as the rest of the cell's work hides. Last, fewer as long as that costs nothing.

    Args:
        counts_GE: int64, of the cell.
        home_E: int64, homes.
        base_NE: bool, what each node hosts under the plan to beat; it shows where loads need replicas.
        base_s: seconds of that plan.
        slots: of a rank.
        target: most assignments that a rank should serve.
        attention_s: of `slowest_attention`.
        prices: the cost model.
    """
    demand_NE = _demand(counts_GE, prices.ranks_per_node)
    order_X = np.argsort(-demand_NE.ravel(), kind="mergesort")
    cell = Cell(counts_GE, demand_NE, order_X, home_E, np.zeros_like(base_NE), target, attention_s, prices)
    found = _plan(cell, slots, NO_LIMIT)
    if found.served_GE.sum(axis=1).max() > target:
        with_base = Cell(counts_GE, demand_NE, order_X, home_E, base_NE, target, attention_s, prices)
        other = _plan(with_base, slots, NO_LIMIT)
        if other.seconds < found.seconds:
            cell, found = with_base, other
    if found.parts_SP[:, _EXPOSED].sum() > 0:
        hidden_slots, hidden_copies = _hidden(found.parts_SP, prices)
        found = _around(cell, found, slots, hidden_slots, hidden_copies, _TOGETHER)
        for _ in range(2):
            before_s = found.seconds
            found = _around(cell, found, slots, found.slots, found.copies, _APART)
            if found.seconds > before_s * (1 - WORTH):
                break
    else:
        found = _economise(cell, found)
    if found.seconds > base_s * (1 - WORTH):
        return np.zeros((0, 0), np.int64), base_s
    return found.served_GE, found.seconds


@kernel
def _around(cell: Any, found: Any, most_slots: int, slots: float, copies: float, steps: Any) -> Any:
    """The best of what was found and plans with multiples of these numbers."""
    for step in steps:
        few_slots = max(1, min(most_slots, int(step[0] * slots + 0.5)))
        few_copies = max(1, min(NO_LIMIT, int(step[1] * copies + 0.5)))
        if few_slots == found.slots and few_copies == found.copies:
            continue
        other = _plan(cell, few_slots, few_copies)
        if other.seconds < found.seconds:
            found = other
    return found


@kernel
def _economise(cell: Any, found: Any) -> Any:
    """Fewer replicas, as long as that takes no more time."""
    enough_s = found.seconds * (1 + WORTH)
    while found.slots > 1:
        other = _plan(cell, found.slots * 3 // 4, found.copies)
        if other.seconds > enough_s:
            break
        found = other
    return found


@kernel
def _plan(cell: Any, slots: int, copies: int) -> Any:
    width, home_E = cell.prices.ranks_per_node, cell.home_E
    guests = slots * width - min(width - 1, slots * width // 4)  # the rest cuts what is too large for one rank
    hosted_NE = choose_hosted(
        cell.demand_NE, cell.order_X, home_E, width, guests, copies, _least(cell.prices), cell.first_NE
    )
    served_GE = serve_locally(cell.demand_NE, hosted_NE, home_E, width, slots, cell.target)
    expert_H, rank_H, tokens_H, pairs_GG = split_by_distance(cell.counts_GE, served_GE, home_E, width, True)
    parts_SP = cell_seconds(
        rows_sent(pairs_GG.T, cell.prices),
        expert_H,
        rank_H,
        tokens_H,
        rank_H != home_E[expert_H],
        home_E,
        cell.attention_s,
        cell.prices,
    )
    return Found(slots, copies, served_GE, parts_SP.sum(), parts_SP)


@kernel
def _demand(counts_GE: Any, ranks_per_node: int) -> Any:
    num_ranks, num_experts = counts_GE.shape
    demand_NE = np.zeros((num_ranks // ranks_per_node, num_experts), np.int64)
    for g in range(num_ranks):
        for e in range(num_experts):
            demand_NE[g // ranks_per_node, e] += counts_GE[g, e]
    return demand_NE


@kernel
def _least(prices: Any) -> int:
    """Assignments of a node for which one more expert on one of its ranks takes as long as the rows it saves.

    It reads its weights and pads half a tile; it saves a row each over the NICs of the node, if all picks of the
    tokens become local with it.
    """
    forwards, backwards = 0, 0
    for _, of_group_forward, of_group_backward in prices.groups:
        forwards += of_group_forward
        backwards += of_group_backward
    weights = (forwards + backwards * prices.backward_weights) * prices.weight_s
    padding = (forwards + backwards * prices.backward_gemm) * prices.tile_rows / 2 * prices.row_s
    saved = 2 * (forwards + backwards) * prices.cluster_row_s / prices.ranks_per_node
    return int(np.ceil((weights + padding) / saved))


@kernel
def _hidden(parts_SP: Any, prices: Any) -> Any:
    """Replicas of a rank, and copies of a home rank's experts, whose transfers about take the time of other work."""
    fetch_s = parts_SP[0].sum() - parts_SP[0, _EXPOSED]
    links_s = parts_SP[1, _ATTENTION] + parts_SP[1, _EXPERTS] + parts_SP[1, _FIXED]
    copies = links_s / (prices.cluster_gradient_s + (2 * prices.cluster_fetch_s if prices.direct else 0.0))
    return min(fetch_s / prices.host_fetch_s, copies), copies
