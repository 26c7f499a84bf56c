"""Loops over picks that compile with a known length: the length of a tuple is part of its type."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_UNROLLED = 16


def as_slots(values: NDArray[np.int64]) -> tuple[int, ...] | NDArray[np.int64]:
    """One value per pick, as a tuple for up to 16 picks; kernels loop over `range(len(slots))` either way.

    Args:
        values: int64 [K].
    """
    return tuple(values.tolist()) if len(values) <= MOST_UNROLLED else values
