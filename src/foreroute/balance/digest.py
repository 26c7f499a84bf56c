"""What binds a plan to the counts that it was made for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def counts_digest(counts_MLGE: NDArray[np.integer]) -> str:
    """XXH3-128, as 32 hexadecimal digits, of the shape and of the values as little-endian int32 in C order.

    Arrays of any integer dtype and layout with the same values have the same digest. It finds damage and mix-ups; it is
    no signature.

    Args:
        counts_MLGE: integers [M, L, G, E], each from 0 to 2**31 - 1.
    """
    from xxhash import xxh3_128

    state = xxh3_128("x".join(map(str, counts_MLGE.shape)).encode())
    for counts_LGE in counts_MLGE:  # in parts, so that another dtype is not copied whole
        state.update(np.ascontiguousarray(counts_LGE, "<i4").data)
    return state.hexdigest()
