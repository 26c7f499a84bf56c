"""Sorting the picks of many rows at once: a network of minima and maxima over whole planes, which vectorises."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from foreroute.kernels import kernel


@lru_cache(maxsize=8)
def comparators(size: int) -> NDArray[np.int64]:
    """int64 [C, 2], Batcher's odd-even merge network for `size` values: pairs (low, high) in order."""
    pairs = []
    sorted_run = 1
    while sorted_run < size:
        step = sorted_run
        while step >= 1:
            for start in range(step % sorted_run, size - step, 2 * step):
                lows = range(start, min(start + step, size - step))
                pairs += [(i, i + step) for i in lows if i // (2 * sorted_run) == (i + step) // (2 * sorted_run)]
            step //= 2
        sorted_run *= 2
    return np.array(pairs, np.int64).reshape(-1, 2)


@kernel
def sort_planes(planes: Any, first: Any, stride: Any, rows: Any, network: Any) -> None:
    """Sort across planes: afterwards plane k holds the k-th smallest value of each row.

    Args:
        planes: uint8 or uint16, flat; plane k starts at `first + k * stride`.
        first: where plane 0 starts.
        stride: distance of two planes.
        rows: values per plane.
        network: int64 [C, 2] from `comparators`.
    """
    for c in range(len(network)):
        low_start = uint64(first + network[c, 0] * stride)
        high_start = uint64(first + network[c, 1] * stride)
        low = planes[low_start : low_start + uint64(rows)]
        high = planes[high_start : high_start + uint64(rows)]
        for i in range(rows):
            a, b = low[i], high[i]
            low[i] = min(a, b)
            high[i] = max(a, b)
