"""Replicas of one cell that keep tokens on their node: how to build them, and how far to go. Compiled.

Replicas that merely balance loads leave most tokens crossing nodes. Here every node first picks, with the slots of all
its ranks, the experts that its tokens want most and that do not live there. Then nodes serve their own tokens as far as
the load target allows, foreign tokens go to the hosting node with the least to do, and inside each node experts are
laid on ranks, largest first, cut where a rank is full. All amounts are whole assignments.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.costs import pricing
from foreroute.costs.links import rows_sent
from foreroute.costs.model import Prices
from foreroute.costs.pricing import cell_seconds
from foreroute.kernels import kernel
from foreroute.planner.split import take_near

NO_LIMIT = 1 << 30
WORTH = 1e-3
"""A plan that saves less than this share of a cell's seconds is not worth its transfers: the cost model is not exact to
a part in a thousand."""
_EXPOSED = pricing.EXPOSED
_ATTENTION, _EXPERTS, _FIXED = pricing.ATTENTION, pricing.EXPERTS, pricing.FIXED
# Factors of (replicas of a rank, copies of a home rank's experts): both together around the estimate of what is hidden,
# then each apart around the best so far. Few, because each is a plan built and priced anew. Chosen by hand.
_TOGETHER = np.array([[1.0, 1.0], [1.5, 1.5], [0.67, 0.67]])
_APART = np.array([[0.75, 1.0], [1.33, 1.0], [1.0, 0.75], [1.0, 1.33]])


Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class SearchInput(NamedTuple):
    """What the search knows of a cell.

    Attributes:
        counts_GE: int64.
        demand_NE: int64, of the ranks of each node together.
        order_X: int64, the flat indices of `demand_NE`, most wanted first.
        home_E: int64, homes.
        target: most assignments that a rank should serve.
        attention_s: of `slowest_attention`.
        prices: the cost model.
    """

    counts_GE: Ints
    demand_NE: Ints
    order_X: Ints
    home_E: Ints
    target: int
    attention_s: NDArray[np.float64]
    prices: Prices


class Candidate(NamedTuple):
    """A plan: its parameters, the loads of its hosts (int64 [G, E]), its seconds, and these by stage and part."""

    slots: int
    copies: int
    served_GE: Ints
    seconds: float
    parts_SP: NDArray[np.float64]


@kernel
def search_cell(cell: SearchInput, base_NE: Bools, base_s: float, slots: int) -> tuple[Ints, Ints, Ints]:
    """The hosts of the fastest plan found: experts and ranks [H], and tokens [H, G]; none if it is no better.

    First come as many replicas as fit. Where their transfers expose time, other numbers are tried, first about as many
    as the rest of the cell's work hides. Last, fewer as long as that costs nothing.

    Args:
        cell: what is known of it.
        base_NE: bool, what each node hosts under the plan to beat; it shows where loads need replicas.
        base_s: seconds of that plan.
        slots: of a rank.
    """
    first_NE = np.zeros_like(base_NE)
    found: Candidate = _plan(cell, first_NE, slots, NO_LIMIT)
    if found.served_GE.sum(axis=1).max() > cell.target:
        other = _plan(cell, base_NE, slots, NO_LIMIT)
        if other.seconds < found.seconds:
            first_NE, found = base_NE, other
    if found.parts_SP[:, _EXPOSED].sum() > 0:
        hidden_slots, hidden_copies = _hidden(found.parts_SP, cell.prices)
        found = _around(cell, first_NE, found, slots, hidden_slots, hidden_copies, _TOGETHER)
        # The second round starts from the best of the first, which may have changed one of the two numbers.
        for _ in range(2):
            before_s = found.seconds
            found = _around(cell, first_NE, found, slots, found.slots, found.copies, _APART)
            if found.seconds > before_s * (1 - WORTH):
                break
    else:
        found = _economise(cell, first_NE, found)
    if found.seconds > base_s * (1 - WORTH):
        return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
    expert_H, rank_H, _, tokens_HG = split_by_distance(
        cell.counts_GE, found.served_GE, cell.home_E, cell.prices.ranks_per_node, False
    )
    return expert_H, rank_H, tokens_HG


@kernel
def _around(
    cell: SearchInput,
    first_NE: Bools,
    found: Candidate,
    most_slots: int,
    slots: float,
    copies: float,
    steps: NDArray[np.float64],
) -> Candidate:
    """The best of what was found and plans with multiples of these numbers."""
    for step in steps:
        few_slots = max(1, min(most_slots, int(step[0] * slots + 0.5)))
        few_copies = max(1, min(NO_LIMIT, int(step[1] * copies + 0.5)))
        if few_slots == found.slots and few_copies == found.copies:
            continue
        other = _plan(cell, first_NE, few_slots, few_copies)
        if other.seconds < found.seconds:
            found = other
    return found


@kernel
def _economise(cell: SearchInput, first_NE: Bools, found: Candidate) -> Candidate:
    """Fewer replicas, as long as that takes no more time."""
    enough_s = found.seconds * (1 + WORTH)
    while found.slots > 1:
        # a quarter fewer each time: few plans to the least
        other = _plan(cell, first_NE, found.slots * 3 // 4, found.copies)
        if other.seconds > enough_s:
            break
        found = other
    return found


@kernel
def _plan(cell: SearchInput, first_NE: Bools, slots: int, copies: int) -> Candidate:
    width, home_E = cell.prices.ranks_per_node, cell.home_E
    # The slots kept back are for parts of experts that are too large for one rank: a slot for each rank but one, and a
    # quarter of all at most (chosen by hand).
    guests = slots * width - min(width - 1, slots * width // 4)
    hosted_NE = choose_hosted(
        cell.demand_NE, cell.order_X, home_E, width, guests, copies, _least(cell.prices), first_NE
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
    return Candidate(slots, copies, served_GE, parts_SP.sum(), parts_SP)


@kernel
def _least(prices: Prices) -> int:
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
def _hidden(parts_SP: NDArray[np.float64], prices: Prices) -> tuple[float, float]:
    """Replicas of a rank, and copies of a home rank's experts, whose transfers about take the time of other work.

    They come from other nodes: one fetch in the recompute, in the update two and a gradient.
    """
    free_S = parts_SP[:, _ATTENTION] + parts_SP[:, _EXPERTS] + parts_SP[:, _FIXED]
    copies = min(
        free_S[0] / prices.cluster_fetch_s, free_S[1] / (2 * prices.cluster_fetch_s + prices.cluster_gradient_s)
    )
    return copies, copies


@kernel
def serve_locally(
    demand_NE: Ints, hosted_NE: Bools, home_E: Ints, ranks_per_node: int, slots: int, target: int
) -> Ints:
    """Loads of all hosts of a cell whose nodes host given experts: int64 [G, E], what each rank serves of each expert.

    Args:
        demand_NE: int64, assignments of each node's own tokens.
        hosted_NE: bool, of `choose_hosted`.
        home_E: int64, homes.
        ranks_per_node: of the topology.
        slots: replicas that a rank may take.
        target: most assignments that a rank should serve. It is kept where this construction finds a way to.
    """
    num_nodes, num_experts = demand_NE.shape
    served_GE = np.zeros((num_nodes * ranks_per_node, num_experts), np.int64)
    load_G = np.zeros(num_nodes * ranks_per_node, np.int64)
    left_NE = _quotas(demand_NE, hosted_NE, target * ranks_per_node)
    for node in range(num_nodes):
        _lay_on_ranks(node, left_NE[node], home_E, ranks_per_node, slots, target, served_GE, load_G)
    for e in range(num_experts):
        left = left_NE[:, e].sum()
        served_GE[home_E[e], e] += left
        load_G[home_E[e]] += left
    _relieve(served_GE, load_G, target, ranks_per_node)
    return served_GE


@kernel
def choose_hosted(
    demand_NE: Ints,
    order_X: Ints,
    home_E: Ints,
    ranks_per_node: int,
    guests: int,
    copies: int,
    least: int,
    first_NE: Bools,
) -> Bools:
    """What each node hosts: bool [N, E]. Its homes, and what its tokens want most.

    Args:
        demand_NE: int64, assignments of each node's own tokens.
        order_X: int64, the flat indices of `demand_NE`, most wanted first.
        home_E: int64, homes.
        ranks_per_node: of the topology.
        guests: experts of other nodes at most that a node hosts.
        copies: other nodes at most that host the experts of one home rank, which receives all their gradients.
        least: a replica for fewer of a node's assignments is not worth its own cost.
        first_NE: bool, hosted before anything else.
    """
    num_nodes, num_experts = demand_NE.shape
    hosted_NE = np.zeros((num_nodes, num_experts), np.bool_)
    free_N = np.full(num_nodes, guests, np.int64)
    copies_G = np.zeros(num_nodes * ranks_per_node, np.int64)
    for e in range(num_experts):
        hosted_NE[home_E[e] // ranks_per_node, e] = True
    # First what must be hosted, then whatever is wanted, each in the order of demand.
    for required in (True, False):
        for x in order_X:
            node, e = x // num_experts, x % num_experts
            if hosted_NE[node, e] or free_N[node] == 0 or (required and not first_NE[node, e]):
                continue
            if required or (copies_G[home_E[e]] < copies and demand_NE[node, e] >= least):
                hosted_NE[node, e] = True
                free_N[node] -= 1
                copies_G[home_E[e]] += 1
    return hosted_NE


@kernel
def _quotas(demand_NE: Ints, hosted_NE: Bools, capacity: int) -> Ints:
    """int64 [N, E], what each node serves of each expert."""
    num_nodes, num_experts = demand_NE.shape
    quota_NE = np.where(hosted_NE, demand_NE, 0)
    load_N = quota_NE.sum(axis=1)
    foreign_E = (demand_NE - quota_NE).sum(axis=0)
    hosts_E = hosted_NE.sum(axis=0)
    # Invariant: load_N is the sum of quota_NE over experts. Experts with one host first: nothing is to be chosen there.
    for flexible in range(2):
        for e in range(num_experts):
            if (hosts_E[e] > 1) != (flexible == 1):
                continue
            while foreign_E[e] > 0:
                first, second = -1, -1
                for node in range(num_nodes):
                    if hosted_NE[node, e]:
                        if first < 0 or load_N[node] < load_N[first]:
                            first, second = node, first
                        elif second < 0 or load_N[node] < load_N[second]:
                            second = node
                amount = foreign_E[e]
                # Up to the level of the next node, or half of what is left: few pieces, and no node is buried.
                if second >= 0:
                    amount = min(amount, max(load_N[second] - load_N[first], (amount + 1) // 2))
                quota_NE[first, e] += amount
                load_N[first] += amount
                foreign_E[e] -= amount
    for node in range(num_nodes):
        _unload_node(node, quota_NE, hosted_NE, load_N, capacity)
    return quota_NE


@kernel
def _unload_node(node: int, quota_NE: Ints, hosted_NE: Bools, load_N: Ints, capacity: int) -> None:
    """Give what exceeds a node's capacity to other hosts, in few pieces."""
    num_nodes, num_experts = quota_NE.shape
    # Each piece either takes the node to its capacity, fills another or takes all of an expert, so it ends.
    while load_N[node] > capacity:
        best, best_e, best_node = 0, -1, -1
        for other in range(num_nodes):
            room = capacity - load_N[other]
            if room <= best:
                continue
            for e in range(num_experts):
                if hosted_NE[other, e] and hosted_NE[node, e]:
                    amount = min(quota_NE[node, e], room, load_N[node] - capacity)
                    if amount > best:
                        best, best_e, best_node = amount, e, other
        if best == 0:
            return
        quota_NE[node, best_e] -= best
        quota_NE[best_node, best_e] += best
        load_N[node] -= best
        load_N[best_node] += best


@kernel
def _lay_on_ranks(
    node: int, left_E: Ints, home_E: Ints, ranks_per_node: int, slots: int, target: int, served_GE: Ints, load_G: Ints
) -> None:
    """Lay a node's experts on its ranks. What found no place stays in `left_E`."""
    num_experts = len(left_E)
    begin, end = node * ranks_per_node, (node + 1) * ranks_per_node
    for e in range(num_experts):
        if begin <= home_E[e] < end:
            served_GE[home_E[e], e] += left_E[e]
            load_G[home_E[e]] += left_E[e]
            left_E[e] = 0
    for rank in range(begin, end):
        # Each turn takes the rank to the target, or all of one expert away from it.
        while load_G[rank] > target:  # cut the largest home expert
            largest = np.argmax(served_GE[rank])
            amount = min(served_GE[rank, largest], load_G[rank] - target)
            served_GE[rank, largest] -= amount
            load_G[rank] -= amount
            left_E[largest] += amount
    # Invariant: no rank that takes a replica is above the target or takes more than `slots`.
    used_G = np.zeros(ranks_per_node, np.int64)
    for e in np.argsort(-left_E):
        while left_E[e] > 0:
            best = -1
            for rank in range(begin, end):
                free = used_G[rank - begin] < slots and served_GE[rank, e] == 0 and rank != home_E[e]
                if free and (best < 0 or load_G[rank] < load_G[best]):
                    best = rank
            if best < 0 or load_G[best] >= target:
                break
            amount = min(left_E[e], target - load_G[best])
            served_GE[best, e] = amount
            load_G[best] += amount
            used_G[best - begin] += 1
            left_E[e] -= amount


@kernel
def _relieve(served_GE: Ints, load_G: Ints, target: int, ranks_per_node: int) -> None:
    """Ranks above the target pass load on to other hosts of their experts, on their own node first."""
    num_ranks, num_experts = served_GE.shape
    # Only hosts that serve an expert already get more of it, and none rises above the target: no transfer is added.
    for same_node in (True, False):
        for rank in range(num_ranks):
            if load_G[rank] <= target:
                continue
            for e in range(num_experts):
                for other in range(num_ranks):
                    if served_GE[rank, e] == 0 or load_G[rank] <= target:
                        break
                    near = rank // ranks_per_node == other // ranks_per_node
                    if other == rank or near != same_node or served_GE[other, e] == 0:
                        continue
                    amount = min(served_GE[rank, e], load_G[rank] - target, target - load_G[other])
                    if amount > 0:
                        served_GE[rank, e] -= amount
                        served_GE[other, e] += amount
                        load_G[rank] -= amount
                        load_G[other] += amount


@kernel
def split_by_distance(
    counts_GE: Ints, served_GE: Ints, home_E: Ints, ranks_per_node: int, by_rank: bool
) -> tuple[Ints, Ints, Ints, Ints]:
    """Hosts in order of experts, and the tokens of each source rank that each serves: own rank, own node, the rest.

    Args:
        counts_GE: int64, of the cell.
        served_GE: int64, what each rank serves of each expert.
        home_E: int64, homes; they are hosts even of nothing.
        ranks_per_node: of the topology.
        by_rank: add up the tokens of all hosts of a rank.

    Returns:
        expert_H, rank_H, tokens_H: int64 [H].
        tokens_HG: int64 [H, G], or [G, G] by rank.
    """
    num_ranks, num_experts = counts_GE.shape
    most = num_experts + int((served_GE > 0).sum())
    expert_H, rank_H, tokens_H = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    tokens_XG = np.zeros((num_ranks if by_rank else most, num_ranks), np.int64)
    left_G, quota_G, num_hosts = np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64), 0
    for e in range(num_experts):
        first = num_hosts
        for g in range(num_ranks):
            left_G[g], quota_G[g] = counts_GE[g, e], served_GE[g, e]
            if quota_G[g] > 0 or home_E[e] == g:
                expert_H[num_hosts], rank_H[num_hosts], tokens_H[num_hosts] = e, g, quota_G[g]
                num_hosts += 1
        # Tokens leave their rank, and then their node, only when no host there has quota left: the most stays near that
        # these loads allow.
        for size in (1, ranks_per_node, num_ranks):
            for h in range(first, num_hosts):
                g = rank_H[h]
                quota_G[g] = take_near(tokens_XG[g if by_rank else h], left_G, quota_G[g], g, size)
    return (
        expert_H[:num_hosts],
        rank_H[:num_hosts],
        tokens_H[:num_hosts],
        tokens_XG[: num_ranks if by_rank else num_hosts],
    )
