"""A lower bound: assignments that the slowest rank of a cell serves at least, with given homes and redundant slots."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.kernels import kernel


def least_loads(
    counts_MLGE: NDArray[np.int32], home_LE: NDArray[np.int16], redundant_slots: int
) -> NDArray[np.float64]:
    """What no plan of these homes and slots can beat, whatever it replicates and however it splits.

    If no rank serves more than T, then (1) T is the mean at least, rounded up; (2) a host of an expert serves T of its
    assignments at most, so that an expert needs ceil(load / T) hosts; (3) what a rank's experts have beyond T goes to
    replicas, each of which takes T at most, and no more than the heaviest of these experts has. By (2) and (3) every
    rank's experts need a number of replicas; together they have as many as there are redundant slots.

    Args:
        counts_MLGE: int32 [M, L, G, E].
        home_LE: int16 [L, E], the rank that every expert lives on.
        redundant_slots: of each rank.

    Returns:
        float64 [M, L], whole numbers: the smallest T that (1) to (3) allow.
    """
    num_micro_steps, num_layers = counts_MLGE.shape[:2]
    bound_ML = np.empty((num_micro_steps, num_layers), np.float64)
    _least_loads(counts_MLGE, home_LE, redundant_slots, bound_ML)
    return bound_ML


@kernel
def _least_loads(counts_MLGE: Any, home_LE: Any, redundant_slots: int, bound_ML: Any) -> None:
    num_micro_steps, num_layers, num_ranks, num_experts = counts_MLGE.shape
    load_E = np.empty(num_experts, np.int64)
    load_G = np.empty(num_ranks, np.int64)
    heaviest_G = np.empty(num_ranks, np.int64)
    for m in range(num_micro_steps):
        for layer in range(num_layers):
            load_E[:] = 0
            for g in range(num_ranks):
                for e in range(num_experts):
                    load_E[e] += counts_MLGE[m, layer, g, e]
            load_G[:] = 0
            heaviest_G[:] = 0
            for e in range(num_experts):
                g = home_LE[layer, e]
                load_G[g] += load_E[e]
                heaviest_G[g] = max(heaviest_G[g], load_E[e])
            # invariant: `low` - 1 is too little, `high` is enough: with every expert at its home alone
            low, high = -(-load_G.sum() // num_ranks), load_G.max()
            while low < high:
                middle = (low + high) // 2
                needed = _replicas_needed(load_E, load_G, heaviest_G, home_LE[layer], middle)
                if needed <= num_ranks * redundant_slots:
                    high = middle
                else:
                    low = middle + 1
            bound_ML[m, layer] = low


@kernel
def _replicas_needed(load_E: Any, load_G: Any, heaviest_G: Any, home_E: Any, most: int) -> int:
    """Replicas without which some rank serves more than `most`, which is 1 at least: a lower bound of their number."""
    crowded_G = np.zeros(len(load_G), np.int64)
    for e in range(len(load_E)):
        if load_E[e] > most:
            crowded_G[home_E[e]] += (load_E[e] - 1) // most
    needed = 0
    for g in range(len(load_G)):
        over = load_G[g] - most
        if over > 0:
            crowded_G[g] = max(crowded_G[g], -(-over // min(most, heaviest_G[g])))
        needed += crowded_G[g]
    return needed
