"""The part of homes: where every expert lives during a step, from where it lives now."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import whole_number
from foreroute.errors import ConfigError, TopologyError
from foreroute.plan.counts import check_counts
from foreroute.plan.options import LARGEST_OPTION
from foreroute.plan.topology import Topology

LARGEST = 1 << 28
"""Sum of all loads of a layer at most, so that six times as much fits into the int32 of the search: twice the surplus
of ranks and once that of nodes, on both sides of a swap. Larger loads are halved until they fit."""


def place_homes(
    counts_MLGE: ArrayLike, topology: Topology, home_LE: ArrayLike, *, max_moves: int | None = None, threads: int = 1
) -> NDArray[np.int16]:
    """Place the experts of each layer for a step, so that micro-steps need few replicas and transfers.

    What is lowered is the sum over micro-steps of what ranks have above the mean, plus half of what nodes have above
    theirs. Pairs of experts exchange their homes, the pair that lowers the sum most first, until no pair within the
    budget does. That keeps E / G experts on every rank.

    Args:
        counts_MLGE: integers [M, L, G, E], assignments of the step.
        topology: G ranks in nodes.
        home_LE: integers [L, E], the rank that each expert lives on now.
        max_moves: most experts of a layer that may change their rank; None sets no limit.
        threads: layers that are searched at a time. Homes do not depend on it.

    Returns:
        home_LE: int16 [L, E]. For no layer is the sum above higher than before (means are rounded down).

    Raises:
        CountsError: for counts that cannot be planned.
        TopologyError: for homes on ranks that are not there, or not as many on every rank.
        ConfigError: for a negative budget, or no thread.
    """
    counts = check_counts(counts_MLGE, num_ranks=topology.num_ranks)
    start_LE = check_homes(home_LE, counts.shape[1], counts.shape[3], topology.num_ranks)
    for name, value, least in (("max_moves", max_moves or 0, 0), ("threads", threads, 1)):
        whole_number(value, name=name, least=least, most=LARGEST_OPTION, error=ConfigError)
    num_layers, num_experts = start_LE.shape
    # an exchange moves two experts or none
    budget = num_experts if max_moves is None else min(max_moves, num_experts)
    if budget < 2 or topology.num_ranks == 1:  # one move alone leaves ranks with unequal numbers of experts
        return start_LE.copy()
    from foreroute.planner import homes_kernels as kernels

    # Each surplus must be carried to another rank, that of a node over the slower link. One placement serves all
    # micro-steps, so their loads are not summed first.
    def placed_E(layer: int) -> NDArray[np.int64]:
        exact_EM, load_EM = layer_loads(counts[:, layer])
        start_E = start_LE[layer].astype(np.int64)
        placement = kernels.new_placement(load_EM, start_E, topology, budget)
        kernels.exchange(placement)
        # Halved loads may have misled the search; the loads as they are decide.
        return min((placement.home_E, start_E), key=lambda home_E: kernels.objective(exact_EM, home_E, topology))

    with ThreadPoolExecutor(threads) as pool:
        return np.stack(list(pool.map(placed_E, range(num_layers)))).astype(np.int16)


def check_homes(home_LE: ArrayLike, num_layers: int, num_experts: int, num_ranks: int) -> NDArray[np.int16]:
    """Homes as int16 [L, E]. Raises `TopologyError` for another shape or type, or not E / G experts on every rank."""
    given: NDArray[Any] = np.asarray(home_LE)
    if given.shape != (num_layers, num_experts) or given.dtype.kind not in "iu":
        raise TopologyError(
            f"got homes of dtype {given.dtype} and shape {given.shape}; "
            f"expected the rank of each of {num_experts} experts in {num_layers} layers"
        )
    if given.min() < 0 or given.max() >= num_ranks:
        wrong = given.min() if given.min() < 0 else given.max()
        raise TopologyError(f"an expert lives on rank {wrong}; expected ranks from 0 to {num_ranks - 1}")
    homes = np.require(given, np.int16, ["C", "A", "W"])  # one kind of array: kernels are compiled once
    held_LG = (homes[:, :, None] == np.arange(num_ranks)).sum(axis=1)
    if (held_LG != num_experts // num_ranks).any():
        layer, g = np.argwhere(held_LG != num_experts // num_ranks)[0]
        raise TopologyError(
            f"in layer {layer}, rank {g} is home to {held_LG[layer, g]} experts; "
            f"expected {num_experts // num_ranks} on every rank"
        )
    return homes


def layer_loads(counts_MGE: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Loads of one layer's experts, [E, M padded with zeros to whole vectors]: as they are, and halved to fit int32."""
    # 16 loads of int32 fill a vector of 512 bits. The added micro-steps have no load and no surplus, and so no cost.
    num_micro_steps, _, num_experts = counts_MGE.shape
    exact_EM = np.zeros((num_experts, -(-num_micro_steps // 16) * 16), np.int64)
    exact_EM[:, :num_micro_steps] = counts_MGE.sum(axis=1, dtype=np.int64).T
    shift, total = 0, int(exact_EM.sum())
    while total >> shift > LARGEST:
        shift += 1
    return exact_EM, (exact_EM >> shift).astype(np.int32)
