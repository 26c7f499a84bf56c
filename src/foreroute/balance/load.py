"""The load of expert-parallel ranks under a placement of experts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import InputError


def contiguous_imbalance(counts_MLE: NDArray[np.int64], num_ranks: int) -> float:
    """Mean over (micro-step, layer) cells of the slowest rank's load over the mean load.

    Each cell is a barrier, so this is the factor by which the experts' time grows when rank g holds the experts
    g * E / G to (g + 1) * E / G - 1 and nothing is balanced.

    Args:
        counts_MLE: assignments per micro-step, layer and expert. Empty cells do not count.
        num_ranks: G; must divide E.

    Returns:
        1.0 when every rank does the same; at most G.
    """
    num_experts = counts_MLE.shape[-1]
    if num_experts % num_ranks:
        raise InputError(f"{num_experts} experts cannot be placed evenly on {num_ranks} ranks; use a divisor")
    loads_CG = counts_MLE.reshape(-1, num_ranks, num_experts // num_ranks).sum(axis=-1)
    loads_CG = loads_CG[loads_CG.sum(axis=1) > 0]
    return float((loads_CG.max(axis=1) / loads_CG.mean(axis=1)).mean()) if len(loads_CG) else 1.0
