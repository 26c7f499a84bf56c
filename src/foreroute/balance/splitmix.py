"""Random words for compiled loops: a stream is one uint64, and the same on every machine. Compiled; loaded on use."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint64

from foreroute.kernels import kernel

SHIFT_32 = uint64(32)
LOW_32 = uint64(0xFFFFFFFF)
TO_UNIT = 1.0 / (1 << 32)


@kernel
def next_word(state: Any) -> Any:
    """Advance a splitmix64 stream (Steele, Lea and Flood, OOPSLA 2014). `state` is uint64 [1]."""
    state[0] += uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> uint64(27))) * uint64(0x94D049BB133111EB)
    return z ^ (z >> uint64(31))


@kernel
def next_unit(state: Any) -> float:
    """A float64 from 0 to below 1."""
    return float(next_word(state) >> SHIFT_32) * TO_UNIT


@kernel
def next_below(state: Any, limit: Any) -> Any:
    """An integer from 0 to below `limit`, itself below 2**32."""
    return np.int64(((next_word(state) >> SHIFT_32) * uint64(limit)) >> SHIFT_32)
