"""What no plan can do better: lower bounds on the assignments of a cell's slowest rank.

Each takes loads_CE, integers [C, E], the assignments of each expert in each of C cells, from all sources, and answers
for all cells at once. Assignments are whole, so bounds are rounded up, but for equal splits.

    perfect_mean <= slot_limited <= fixed_placement          whatever is replicated; in so many slots; on these hosts
    perfect_mean <= equal_split                              copies of an expert serve the same share each
    perfect_mean <= one_copy                                 nothing is replicated
    perfect_mean <= node_floor                               experts are replicated inside their home's node only

Each cell is a barrier, so the sum of any of them over the cells of a step bounds the step.

The inner loops are compiled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import CountsError, TopologyError
from foreroute.kernels import kernel
from foreroute.plan.step_plan import StepPlan
from foreroute.plan.topology import Topology


def cell_loads(counts_MLGE: NDArray[np.integer]) -> NDArray[np.int64]:
    """loads_CE: int64 [M * L, E], cells in the order of execution."""
    num_micro_steps, num_layers, _, num_experts = counts_MLGE.shape
    loads_MLE: NDArray[np.int64] = counts_MLGE.sum(axis=2, dtype=np.int64)
    return loads_MLE.reshape(num_micro_steps * num_layers, num_experts)


def perfect_mean(loads_CE: ArrayLike, num_ranks: int) -> NDArray[np.int64]:
    """All ranks serve the same: ceil(total / G). int64 [C]."""
    total_C: NDArray[np.int64] = _checked(loads_CE, num_ranks).sum(axis=1)
    return -(-total_C // num_ranks)


def one_copy(loads_CE: ArrayLike, num_ranks: int) -> NDArray[np.int64]:
    """Every expert is served whole on one rank, wherever it lives: the largest of all loads and the mean. int64 [C]."""
    loads = _checked(loads_CE, num_ranks)
    largest_C: NDArray[np.int64] = loads.max(axis=1)
    return np.maximum(largest_C, perfect_mean(loads, num_ranks))


def equal_split(loads_CE: ArrayLike, num_ranks: int, slots: int) -> NDArray[np.float64]:
    """The copies of an expert serve the same share each, on different ranks, wherever they are put.

    The largest of the mean and of the shares, when the copies are spread so that the largest share is least.

    Args:
        loads_CE: as above.
        num_ranks: G; an expert has so many copies at most.
        slots: copies of all experts together, homes included: E + G * R.

    Returns:
        float64 [C].
    """
    loads = _checked(loads_CE, num_ranks)
    least_C = np.empty(len(loads), np.float64)
    equal_splits(loads, num_ranks, _extra(slots, loads.shape[1]), least_C)
    return least_C


def slot_limited(loads_CE: ArrayLike, num_ranks: int, slots: int) -> NDArray[np.int64]:
    """Any split over any hosts, in so many slots S: the smallest T from the mean on that the slots suffice for.

    A host serves T at most, so an expert needs ceil(load / T) of them: sum(max(1, ceil(load / T))) <= S.

    Args:
        loads_CE: as above.
        num_ranks: G.
        slots: S, hosts of all experts together, homes included: E + G * R.

    Returns:
        int64 [C].
    """
    loads = _checked(loads_CE, num_ranks)
    _extra(slots, loads.shape[1])
    least_C = np.empty(len(loads), np.int64)
    slot_limits(loads, num_ranks, slots, least_C)
    return least_C


def fixed_placement(
    loads_CE: ArrayLike, expert_H: ArrayLike, rank_H: ArrayLike, offsets: ArrayLike, num_ranks: int
) -> NDArray[np.int64]:
    """The best that any split can do over given hosts; attained by some split, so it measures a split exactly.

    By minimum cuts it equals the largest, over sets of ranks, of what is hosted inside the set alone per rank of it.

    Args:
        loads_CE: as above.
        expert_H: integers [H], hosts of all cells, one after the other: the expert of each.
        rank_H: integers [H], and its rank.
        offsets: integers [C + 1], cell c owns the hosts `offsets[c]:offsets[c + 1]`.
        num_ranks: G.

    Returns:
        int64 [C].

    Raises:
        CountsError: when an expert with assignments has no host, or a host is no expert on no rank.
    """
    loads = _checked(loads_CE, num_ranks)
    experts, ranks, bounds = (np.ascontiguousarray(a, np.int64) for a in (expert_H, rank_H, offsets))
    steps = np.diff(bounds)
    if bounds.shape != (len(loads) + 1,) or bounds[0] != 0 or bounds[-1] != len(experts) or steps.min(initial=0) < 0:
        raise CountsError(
            f"offsets of shape {bounds.shape} do not cut {len(experts)} hosts into {len(loads)} cells; "
            f"expected {len(loads) + 1} ascending numbers from 0 to {len(experts)}"
        )
    for name, numbers, limit in (("expert", experts, loads.shape[1]), ("rank", ranks, num_ranks)):
        if numbers.shape != experts.shape or numbers.min(initial=0) < 0 or numbers.max(initial=0) >= limit:
            raise CountsError(f"{name}s of {len(experts)} hosts: expected one each, from 0 to {limit - 1}")
    least_C = np.empty(len(loads), np.int64)
    fixed_hosts(loads, experts, ranks, bounds, num_ranks, least_C)
    if (least_C < 0).any():
        raise CountsError(f"in cell {int(np.argmin(least_C))}, an expert with assignments has no host")
    return least_C


def best_split(counts_MLGE: NDArray[np.integer], plan: StepPlan) -> NDArray[np.int64]:
    """`fixed_placement` of the homes and replicas of a plan: the least `max_load_ML` that they allow. int64 [M, L]."""
    num_micro_steps, num_layers, num_experts = plan.shape
    num_cells = num_micro_steps * num_layers
    replicas_C = np.diff(plan.offsets)
    offsets = plan.offsets + num_experts * np.arange(num_cells + 1)
    is_home_H = np.arange(offsets[-1]) - np.repeat(offsets[:-1], replicas_C + num_experts) < num_experts
    expert_H, rank_H = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
    expert_H[is_home_H] = np.tile(np.arange(num_experts), num_cells)
    rank_H[is_home_H] = np.tile(plan.home_LE.ravel(), num_micro_steps)
    expert_H[~is_home_H], rank_H[~is_home_H] = plan.expert_R, plan.rank_R
    least_C = fixed_placement(cell_loads(counts_MLGE), expert_H, rank_H, offsets, plan.topology.num_ranks)
    return least_C.reshape(num_micro_steps, num_layers)


def node_floor(loads_CE: ArrayLike, home_CE: ArrayLike, topology: Topology) -> NDArray[np.int64]:
    """Experts are replicated inside the node of their home only: the heaviest node's load per rank of it. int64 [C].

    Args:
        loads_CE: as above.
        home_CE: integers [C, E], or [E] for all cells, the rank that each expert lives on.
        topology: G ranks in nodes.

    Raises:
        TopologyError: when an expert lives on no rank of the topology.
    """
    loads = _checked(loads_CE, topology.num_ranks)
    nodes_CE = np.broadcast_to(np.asarray(home_CE), loads.shape) // topology.ranks_per_node
    if nodes_CE.min(initial=0) < 0 or nodes_CE.max(initial=0) >= topology.num_nodes:
        raise TopologyError(f"an expert's home is not among the {topology.num_ranks} ranks")
    held_CN = _held(loads, nodes_CE, topology.num_nodes)
    heaviest_C: NDArray[np.int64] = held_CN.max(axis=1)
    return -(-heaviest_C // topology.ranks_per_node)


def any_packing(loads_LE: ArrayLike, home_LE: ArrayLike, num_ranks: int) -> NDArray[np.int64]:
    """Without replicas, packing cannot change what a rank serves in a whole step: its layers' largest rank totals.

    So in each layer the sum over micro-steps of the slowest rank's load is at least this, however sequences are dealt
    to micro-steps (RoutePack, arXiv 2608.12146).

    Args:
        loads_LE: integers [L, E], assignments of the whole step.
        home_LE: integers [L, E], the rank that each expert lives on.
        num_ranks: G.

    Returns:
        int64 [L].
    """
    loads = _checked(loads_LE, num_ranks)
    largest_L: NDArray[np.int64] = _held(loads, np.broadcast_to(np.asarray(home_LE), loads.shape), num_ranks).max(
        axis=1
    )
    return largest_L


def _held(loads_CE: NDArray[np.int64], holder_CE: NDArray[Any], count: int) -> NDArray[np.int64]:
    """int64 [C, count], the loads of the experts that each rank or node holds."""
    held = np.zeros((len(loads_CE), count), np.int64)
    np.add.at(held, (np.arange(len(loads_CE))[:, None], holder_CE), loads_CE)
    return held


def _checked(loads_CE: ArrayLike, num_ranks: int) -> NDArray[np.int64]:
    loads: NDArray[Any] = np.asarray(loads_CE)
    if loads.ndim != 2 or not loads.shape[1] or loads.dtype.kind not in "iu" or loads.min(initial=0) < 0:
        raise CountsError(
            f"got loads of dtype {loads.dtype} and shape {loads.shape}; expected integers [cells, experts] from 0"
        )
    if num_ranks < 1:
        raise TopologyError(f"num_ranks is {num_ranks}; expected at least 1")
    return np.ascontiguousarray(loads, np.int64)


def _extra(slots: int, num_experts: int) -> int:
    if slots < num_experts:
        raise TopologyError(f"{slots} slots do not hold {num_experts} experts; expected one for each at least")
    return slots - num_experts


@kernel
def equal_splits(load_CE: Any, num_ranks: Any, copies: Any, least_C: Any) -> None:
    """Give `copies` further copies, one by one, to the expert with the largest share. `least_C`: float64 [C], written.

    That is optimal: as long as the largest share is not the least possible, its expert needs one more copy.
    """
    share_E, count_E = np.empty(load_CE.shape[1]), np.empty(load_CE.shape[1], np.int64)
    for c in range(load_CE.shape[0]):
        for e in range(len(share_E)):
            share_E[e], count_E[e] = load_CE[c, e], 1
        for _ in range(copies):
            hottest = np.argmax(share_E)
            # with a copy on every rank, the largest share cannot fall any more
            if count_E[hottest] == num_ranks:
                break
            count_E[hottest] += 1
            share_E[hottest] = load_CE[c, hottest] / count_E[hottest]
        least_C[c] = max(share_E.max(), load_CE[c].sum() / num_ranks)


@kernel
def slot_limits(load_CE: Any, num_ranks: Any, slots: Any, least_C: Any) -> None:
    """Bisect for the smallest T, from the mean on, with sum(max(1, ceil(load / T))) <= slots. int64 [C], written."""
    for c in range(load_CE.shape[0]):
        total = load_CE[c].sum()
        low, high = -(-total // num_ranks), max(load_CE[c].max(), -(-total // num_ranks))
        # the slots suffice for `high`, with which at the latest every expert needs one, and for no T below `low`
        while low < high:
            middle = (low + high) // 2
            needed = 0
            for e in range(load_CE.shape[1]):
                needed += max(1, -(-load_CE[c, e] // middle))
            if needed <= slots:
                high = middle
            else:
                low = middle + 1
        least_C[c] = low


@kernel
def fixed_hosts(load_CE: Any, expert_H: Any, rank_H: Any, offsets: Any, num_ranks: Any, least_C: Any) -> None:
    """Least load of the slowest rank for given hosts, per cell: int64 [C], written; -1 where a load has no host."""
    for c in range(load_CE.shape[0]):
        part = slice(offsets[c], offsets[c + 1])
        least_C[c] = _least(load_CE[c], expert_H[part], rank_H[part], num_ranks)


@kernel
def _least(load_E: Any, expert_H: Any, rank_H: Any, num_ranks: Any) -> Any:
    """Raise a target from the mean to the densest closed set of ranks until loads can be levelled to it.

    From a rank above the target, load flows along hosts: an expert served on a can be served on b when b hosts it.
    Where no rank below the target is reached, what the reached ranks serve has no host elsewhere, so the target rises
    to their mean. It is a bound at every moment and is attained at the end.
    """
    by_rank, by_expert = _grouped(rank_H, num_ranks), _grouped(expert_H, len(load_E))
    served_H, load_G = np.zeros(len(rank_H), np.int64), np.zeros(num_ranks, np.int64)
    for e in range(len(load_E)):
        if load_E[e] > 0:
            if by_expert[1][e] == by_expert[1][e + 1]:
                return -1
            first = by_expert[0][by_expert[1][e]]
            served_H[first] = load_E[e]
            load_G[rank_H[first]] += load_E[e]
    target = -(-load_G.sum() // num_ranks)
    hosts = (expert_H, rank_H, by_rank, by_expert)
    entered = (np.empty(num_ranks, np.int64), np.empty(num_ranks, np.int64))
    queue = np.empty(num_ranks, np.int64)
    # the target only rises, so ranks that were brought down to it stay at or below it
    for source in range(num_ranks):
        while load_G[source] > target:
            reached, sink = _search(source, target, load_G, served_H, hosts, entered, queue)
            if sink < 0:
                # the reached ranks are a closed set, all at or above the target and the source above it
                inside = 0
                for i in range(reached):
                    inside += load_G[queue[i]]
                target = -(-inside // reached)
            else:
                _push(source, sink, target, load_G, served_H, rank_H, entered)
    return target


@kernel
def _grouped(key_H: Any, count: Any) -> Any:
    """Hosts in the order of a key, and where each key begins: int64 [H] and [count + 1]."""
    first = np.zeros(count + 1, np.int64)
    for h in range(len(key_H)):
        first[key_H[h] + 1] += 1
    for k in range(count):
        first[k + 1] += first[k]
    order, place = np.empty(len(key_H), np.int64), first.copy()
    for h in range(len(key_H)):
        order[place[key_H[h]]] = h
        place[key_H[h]] += 1
    return order, first


@kernel
def _search(source: Any, target: Any, load_G: Any, served_H: Any, hosts: Any, entered: Any, queue: Any) -> Any:
    """Breadth first to a rank below the target: how many were reached before it, and its number or -1.

    Rank b is entered by moving load from host `entered[0][b]` to host `entered[1][b]`.
    """
    expert_H, rank_H, by_rank, by_expert = hosts
    from_G, to_G = entered
    for g in range(len(from_G)):
        from_G[g] = -1
    queue[0], head, tail = source, 0, 1
    while head < tail:
        a = queue[head]
        head += 1
        for i in range(by_rank[1][a], by_rank[1][a + 1]):
            h = by_rank[0][i]
            if served_H[h] > 0:
                e = expert_H[h]
                for j in range(by_expert[1][e], by_expert[1][e + 1]):
                    other = by_expert[0][j]
                    b = rank_H[other]
                    if b != source and from_G[b] < 0:
                        from_G[b], to_G[b] = h, other
                        if load_G[b] < target:
                            return tail, b
                        queue[tail] = b
                        tail += 1
    return tail, -1


@kernel
def _push(source: Any, sink: Any, target: Any, load_G: Any, served_H: Any, rank_H: Any, entered: Any) -> None:
    """Move load along the path that `_search` found: as much as both ends and every host on the way allow."""
    from_G, to_G = entered
    amount = min(load_G[source] - target, target - load_G[sink])
    g = sink
    while g != source:
        amount = min(amount, served_H[from_G[g]])
        g = rank_H[from_G[g]]
    g = sink
    while g != source:
        served_H[from_G[g]] -= amount
        served_H[to_G[g]] += amount
        g = rank_H[from_G[g]]
    load_G[source] -= amount
    load_G[sink] += amount
