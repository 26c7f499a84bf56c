"""The part of homes: where every expert lives during a step, from where it lives now. Compiled (homes.cpp).

Layers are searched one at a time, by exchanges of two experts. The objective is twice the surplus of all ranks over
their mean, in every micro-step, plus that of all nodes. Counting in int32 lets an exchange be priced in a few vector
instructions. Simulated annealing after it lowers the objective by 0 to 6 % more and changes no plan beyond what another
seed of it does: on the workloads G8 to G64 and R8, with budgets of 4, 16 and all experts, modelled seconds of steps
differ by -0.2 to 0.1 % in the mean of five draws.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import whole_number
from foreroute.errors import ConfigError
from foreroute.kernels import INT, ArrayOf, compiled
from foreroute.plan.counts import check_counts
from foreroute.plan.options import LARGEST_OPTION
from foreroute.plan.topology import Topology, check_homes

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

    # Each surplus must be carried to another rank, that of a node over the slower link. One placement serves all
    # micro-steps, so their loads are not summed first.
    def placed_E(layer: int) -> NDArray[np.int64]:
        exact_EM, load_EM = layer_loads(counts[:, layer])
        start_E = start_LE[layer].astype(np.int64)
        table_XM = np.concatenate([load_EM, surpluses(load_EM, start_E, topology)]).astype(np.int32)
        home_E = start_E.copy()
        _exchange(table_XM, home_E, start_E, topology.num_ranks, topology.ranks_per_node, budget)
        # Halved loads may have misled the search; the loads as they are decide.
        return min((home_E, start_E), key=lambda home_E: objective(exact_EM, home_E, topology))

    with ThreadPoolExecutor(threads) as pool:
        return np.stack(list(pool.map(placed_E, range(num_layers)))).astype(np.int16)


_exchange = compiled(
    "exchange_homes",
    ArrayOf(np.int32, 2, filled=True),
    ArrayOf(np.int64, 1, filled=True),
    ArrayOf(np.int64, 1),
    INT,
    INT,
    INT,
)


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


def objective(load_EM: NDArray[np.int64], home_E: NDArray[np.int64], topology: Topology) -> int:
    """The sum that is lowered."""
    cost_X = np.maximum(surpluses(load_EM, home_E, topology), 0).sum(axis=1)
    return int(2 * cost_X[: topology.num_ranks].sum() + cost_X[topology.num_ranks :].sum())


def surpluses(load_EM: NDArray[np.integer], home_E: NDArray[np.int64], topology: Topology) -> NDArray[np.int64]:
    """int64 [G + N, M], load of each rank and node minus their mean, rounded down."""
    # All places lose the same, so comparisons hold though the mean is rounded.
    by_rank = load_EM[np.argsort(home_E)].astype(np.int64).reshape(topology.num_ranks, -1, load_EM.shape[1])
    load_GM = by_rank.sum(axis=1)
    load_NM = load_GM.reshape(topology.num_nodes, topology.ranks_per_node, -1).sum(axis=1)
    return np.concatenate([load - load.sum(axis=0) // len(load) for load in (load_GM, load_NM)])
