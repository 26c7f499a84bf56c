"""One pass over counts. Compiled; loaded on first use."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreroute.kernels import kernel


@kernel
def scan_counts(counts_CE: Any, least_C: Any, total_C: Any) -> None:
    """Smallest entry and total of each row of int32 [C, E]; both int64 [C], written."""
    for c in range(counts_CE.shape[0]):
        least, total = np.int32(0), np.int64(0)
        for e in range(counts_CE.shape[1]):
            least = min(least, counts_CE[c, e])
            total += counts_CE[c, e]
        least_C[c], total_C[c] = least, total
