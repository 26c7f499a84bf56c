"""The inner loops of counting, and of looking counts over. Compiled; loaded on first use."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint64

from foreroute.kernels import kernel


@kernel
def add_counts(
    flat_ids: Any, valid_N: Any, offsets: Any, order: Any, start_S: Any, stride: Any, held_LE: Any, flat_counts: Any
) -> None:
    """Count the picks of some sequences.

    Args:
        flat_ids: uint8 or uint16, [N, L, K] flattened.
        valid_N: bool [N].
        offsets: int64 [S + 1].
        order: int64, sequence numbers; those of one start are neighbours.
        start_S: int64 [S], where the counts of each sequence's first layer begin in `flat_counts`.
        stride: from one layer's counts to the next one's.
        held_LE: uint32 [L, E] of zeros, and zeros again afterwards. Small enough for the first-level cache, and free
            of the collisions in it that a large power of two as `stride` would cause.
        flat_counts: int32, added to.
    """
    num_layers, num_experts = held_LE.shape
    held = held_LE.reshape(-1)
    row_size = uint64(flat_ids.size // max(1, len(valid_N)))
    top_k = row_size // uint64(num_layers)
    for i in range(len(order)):
        s = order[i]
        for row in range(offsets[s], offsets[s + 1]):
            if valid_N[row]:
                source, base = uint64(row) * row_size, uint64(0)
                for _ in range(num_layers):
                    for _ in range(top_k):
                        held[base + uint64(flat_ids[source])] += np.uint32(1)
                        source += uint64(1)
                    base += uint64(num_experts)
        if i + 1 == len(order) or start_S[order[i + 1]] != start_S[s]:
            for layer in range(num_layers):
                target = start_S[s] + layer * stride
                for e in range(num_experts):
                    flat_counts[target + e] += np.int32(held_LE[layer, e])
            held[:] = 0


@kernel
def scan_counts(counts_CE: Any, least_C: Any, total_C: Any) -> None:
    """Smallest entry and total of each row of int32 [C, E]; both int64 [C], written."""
    for c in range(counts_CE.shape[0]):
        least, total = np.int32(0), np.int64(0)
        for e in range(counts_CE.shape[1]):
            least = min(least, counts_CE[c, e])
            total += counts_CE[c, e]
        least_C[c], total_C[c] = least, total
