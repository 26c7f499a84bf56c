"""EPLB, and LPLB-style on it: replicas and homes placed anew by total loads.

Under EPLB every source splits its tokens evenly over the copies of an expert. Whoever runs it decides which loads it
sees: those of the step before, as in practice; those of this step, which a trace tells; or those of the very
micro-step, with all weights moving in every cell. It knows no cost of moving, and one group without nodes is its usual
form for models without grouped routing.

The placement is that of github.com/deepseek-ai/EPLB, with heaps instead of scans: pack expert groups into nodes,
replicate inside each node whatever has the largest load per copy, pack the copies into ranks. Both packings take items
from the heaviest down and put each into the lightest bin that has room. Ties go to the lower number, and loads are
float32, as published, so that placements are equal to the published ones, copy by copy.

LPLB-style is after github.com/deepseek-ai/LPLB, which needs a GPU. Experts are ordered by EPLB without copies. Each
rank has, in its redundant slots, copies of the heaviest experts of R other ranks, those that a torus or hypercube links
it to. Per cell, the tokens of the copied experts are divided so that the slowest rank has least. Here the order and the
choice of copies know this step's loads, and the program is solved exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import TopologyError
from foreroute.kernels import kernel
from foreroute.plan.step_plan import CellHosts
from foreroute.planner.balancers.problem import BalancerInput, SlotContents
from foreroute.planner.balancers.splits import even_split, level_quotas, split_by_quota

Hosts = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]
"""Expert, rank and copies there, of every host."""


def eplb_previous(problem: BalancerInput) -> Iterator[CellHosts]:
    """Placed once by the loads of the step before."""
    return _fixed(problem, problem.previous_loads_LE())


def eplb_step(problem: BalancerInput) -> Iterator[CellHosts]:
    """Placed once by the loads of this step."""
    return _fixed(problem, problem.loads_LE())


def eplb_step_lp(problem: BalancerInput) -> Iterator[CellHosts]:
    """Placed once by the loads of this step; tokens are split as well as those copies allow, in every cell."""
    hosts_L = [eplb_hosts(loads_E, problem) for loads_E in problem.loads_LE()]
    contents = SlotContents(problem)
    node_G = problem.topology.node_G
    for layer, counts_GE in problem.cells():
        expert_H, rank_H, _ = hosts_L[layer]
        quota_H, _ = level_quotas(expert_H, rank_H, counts_GE.sum(axis=0), len(node_G))
        yield contents.host(layer, expert_H, rank_H, split_by_quota(expert_H, rank_H, quota_H, node_G, counts_GE))


def eplb_micro_step(problem: BalancerInput) -> Iterator[CellHosts]:
    """Placed anew in every cell by its own loads."""
    contents = SlotContents(problem)
    for layer, counts_GE in problem.cells():
        expert_H, rank_H, copies_H = eplb_hosts(counts_GE.sum(axis=0), problem)
        yield contents.host(layer, expert_H, rank_H, even_split(expert_H, copies_H, counts_GE))


def eplb_hosts(loads_E: NDArray[np.int64], problem: BalancerInput) -> Hosts:
    """The hosts of one layer. EPLB may put two copies of an expert on one rank; they are one host."""
    num_ranks, num_experts = problem.topology.num_ranks, len(loads_E)
    expert_P = eplb_placement(loads_E, problem.slots * num_ranks, 1, 1, num_ranks)
    rank_P = np.arange(len(expert_P)) // problem.slots
    host_P, copies_H = np.unique(expert_P * num_ranks + rank_P, return_counts=True)
    expert_H, rank_H = np.divmod(host_P, num_ranks)
    assert expert_H[-1] == num_experts - 1, "every expert has a copy"
    return expert_H.astype(np.int32), rank_H.astype(np.int32), copies_H.astype(np.int32)


def _fixed(problem: BalancerInput, loads_LE: NDArray[np.int64]) -> Iterator[CellHosts]:
    hosts_L = [eplb_hosts(loads_E, problem) for loads_E in loads_LE]
    contents = SlotContents(problem)
    for layer, counts_GE in problem.cells():
        expert_H, rank_H, copies_H = hosts_L[layer]
        yield contents.host(layer, expert_H, rank_H, even_split(expert_H, copies_H, counts_GE))


def lplb_style(problem: BalancerInput) -> Iterator[CellHosts]:
    """Fixed homes and copies, tokens split by the linear program of each cell."""
    hosts_L = [_lplb_hosts(loads_E, problem) for loads_E in problem.loads_LE()]
    contents = SlotContents(problem)
    node_G = problem.topology.node_G
    for layer, counts_GE in problem.cells():
        expert_H, rank_H = hosts_L[layer]
        quota_H, _ = level_quotas(expert_H, rank_H, counts_GE.sum(axis=0), len(node_G))
        yield contents.host(layer, expert_H, rank_H, split_by_quota(expert_H, rank_H, quota_H, node_G, counts_GE))


def linked_ranks(num_ranks: int, degree: int) -> NDArray[np.int64]:
    """int64 [degree, G], the ranks that hold the copies of each rank's experts.

    A hypercube where the degree is that of one, else the nearest to a torus of that many dimensions: steps of
    G^(k / degree), k from 0. No rank is its own neighbour, and none is twice.
    """
    rank_G = np.arange(num_ranks)
    if 1 << degree == num_ranks:
        return rank_G ^ (1 << np.arange(degree))[:, None]
    steps: list[int] = []
    for k in range(min(degree, num_ranks - 1)):
        step = max(1, round(num_ranks ** (k / degree)))
        # where rounding gives a step twice, the next free one is taken
        while step in steps:
            step = step % (num_ranks - 1) + 1
        steps.append(step)
    return (rank_G + np.array(steps, np.int64)[:, None]) % num_ranks


def _lplb_hosts(loads_E: NDArray[np.int64], problem: BalancerInput) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    num_ranks, num_experts = problem.topology.num_ranks, problem.num_experts
    per_rank = num_experts // num_ranks
    home_GP = eplb_placement(loads_E, num_experts, 1, 1, num_ranks).reshape(num_ranks, per_rank)
    heaviest = np.argsort(-loads_E[home_GP], axis=1, kind="stable")
    sorted_GP = np.take_along_axis(home_GP, heaviest, axis=1)
    helpers = linked_ranks(num_ranks, problem.topology.redundant_slots)
    # a rank with fewer experts than linked ranks has each of them copied to more than one.
    copied_RG = sorted_GP.T[np.arange(len(helpers)) % per_rank]
    expert_H = np.concatenate([home_GP.reshape(-1), copied_RG.reshape(-1)])
    rank_H = np.concatenate([np.repeat(np.arange(num_ranks), per_rank), helpers.reshape(-1)])
    return expert_H.astype(np.int32), rank_H.astype(np.int32)


def eplb_placement(
    loads_E: NDArray[np.number], num_copies: int, num_groups: int, num_nodes: int, num_ranks: int
) -> NDArray[np.int64]:
    """The logical expert in every physical slot.

    Args:
        loads_E: [E].
        num_copies: physical experts on all ranks together, P * G.
        num_groups: groups of consecutive experts that stay in one node. When nodes do not divide them, groups and
            nodes are left out of account.
        num_nodes: N.
        num_ranks: G.

    Returns:
        expert_P: int64 [num_copies]; rank g has the slots g * num_copies / G and on.

    Raises:
        TopologyError: when experts, copies, groups and ranks do not divide as they must.
    """
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    num_experts = len(loads_E)
    if num_experts % num_groups or num_ranks % num_nodes or num_copies % num_ranks or num_copies < num_experts:
        raise TopologyError(
            f"{num_experts} experts in {num_groups} groups and {num_copies} copies do not divide over {num_ranks} "
            f"ranks in {num_nodes} nodes; EPLB needs equal groups, and as many copies on every rank"
        )
    placement: NDArray[np.int64] = _place(loads_E.astype(np.float32), num_copies, num_groups, num_nodes, num_ranks)
    return placement


@kernel
def _place(loads_E: Any, num_copies: int, num_groups: int, num_nodes: int, num_ranks: int) -> Any:
    """As `eplb_placement`, on float32 loads and unchecked."""
    num_experts = len(loads_E)
    group_size = num_experts // num_groups
    group_loads = np.zeros(num_groups, np.float32)
    for e in range(num_experts):
        group_loads[e // group_size] += loads_E[e]
    group_slots = _pack(group_loads, num_nodes)
    expert_P = np.empty(num_copies, np.int64)
    node_experts = num_experts // num_nodes
    node_copies = num_copies // num_nodes
    members = np.empty(num_experts, np.int64)
    for group in range(num_groups):
        # groups in the order of their nodes, and within a node in the order in which they were packed
        for i in range(group_size):
            members[group_slots[group] * group_size + i] = group * group_size + i
    for node in range(num_nodes):
        local = members[node * node_experts : (node + 1) * node_experts]
        copied, copies = _replicate(loads_E[local], node_copies)
        copy_loads = np.empty(node_copies, np.float32)
        for c in range(node_copies):
            copy_loads[c] = loads_E[local[copied[c]]] / np.float32(copies[copied[c]])
        slots = _pack(copy_loads, num_ranks // num_nodes)
        for c in range(node_copies):
            expert_P[node * node_copies + slots[c]] = local[copied[c]]
    return expert_P


@kernel
def _replicate(loads_E: Any, num_copies: int) -> Any:
    """int64 [num_copies], the expert of each copy, one of each expert first, and int64 [E], copies of each."""
    num_experts = len(loads_E)
    copies_E = np.ones(num_experts, np.int64)
    expert_C = np.empty(num_copies, np.int64)
    key, heap = -loads_E, np.arange(num_experts)
    _heapify(heap, key)
    expert_C[:num_experts] = np.arange(num_experts)
    for c in range(num_experts, num_copies):
        e = heap[0]
        expert_C[c] = e
        copies_E[e] += 1
        # only the top's key has changed, and upwards, so that it can only sink
        key[e] = -(loads_E[e] / np.float32(copies_E[e]))
        _sink(heap, key, 0, num_experts)
    return expert_C, copies_E


@kernel
def _pack(loads_I: Any, num_bins: int) -> Any:
    """int64 [I], the slot of each item. Every bin has I / num_bins of the slots, bin 0 the first of them."""
    room = len(loads_I) // num_bins
    if room == 1:
        return np.arange(len(loads_I))
    slots = np.empty(len(loads_I), np.int64)
    filled = np.zeros(num_bins, np.int64)
    key, heap, size = np.zeros(num_bins, np.float32), np.arange(num_bins), num_bins
    for i in by_heap(-loads_I):
        b = heap[0]
        slots[i] = b * room + filled[b]
        filled[b] += 1
        key[b] += loads_I[i]
        if filled[b] == room:
            # a full bin leaves the heap
            size -= 1
            heap[0] = heap[size]
        _sink(heap, key, 0, size)
    return slots


@kernel
def by_heap(key: Any) -> Any:
    """int64 [I], numbers by ascending key, the lower number first among equal keys.

    As numpy's stable sort, whose form in numba takes seconds to compile.
    """
    order, heap, size = np.empty(len(key), np.int64), np.arange(len(key)), len(key)
    _heapify(heap, key)
    for i in range(len(key)):
        order[i] = heap[0]
        size -= 1
        heap[0] = heap[size]
        _sink(heap, key, 0, size)
    return order


@kernel
def _heapify(heap: Any, key: Any) -> None:
    for i in range(len(heap) // 2 - 1, -1, -1):
        _sink(heap, key, i, len(heap))


@kernel
def _sink(heap: Any, key: Any, at: int, size: int) -> None:
    """Restore the heap of numbers with the least key on top, the lower number first among equal keys."""
    number = heap[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size:
            a, b = heap[child], heap[child + 1]
            if key[b] < key[a] or (key[b] == key[a] and b < a):
                child += 1
        c = heap[child]
        if key[c] < key[number] or (key[c] == key[number] and c < number):
            heap[at] = c
            at = child
        else:
            break
    if size > 0:
        heap[at] = number
