"""Loops over all picks of a trace: the check, the counts, and sets that are read from a file. Compiled.

Other files import from here inside functions alone: numba is slow to load. Arithmetic on positions is in uint64: numba
makes a float of an int64 and a uint64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint64

from foreroute.kernels import kernel


@kernel
def first_bad_picks(flat_ids: Any, num_layers: Any, top_k: Any, rows: Any, num_experts: Any) -> Any:
    """Find the first (row, layer) of `rows` with an id of E or more or an expert twice: row * L + layer, or -1.

    Args:
        flat_ids: uint8 or uint16, [N, L, K] flattened.
        num_layers: L.
        top_k: K.
        rows: int64 [R].
        num_experts: E.
    """
    # seen[e] is the stamp of the last row and layer that picked e. No two have the same, so that nothing needs to be
    # cleared in between.
    seen = np.zeros(1 << (8 * flat_ids.itemsize), np.int64)
    stamp = 0
    for i in range(len(rows)):
        source = uint64(rows[i]) * uint64(num_layers) * uint64(top_k)
        for layer in range(num_layers):
            stamp += 1
            bad = False
            for _ in range(top_k):
                expert = uint64(flat_ids[source])
                bad |= (seen[expert] == stamp) | (expert >= uint64(num_experts))
                seen[expert] = stamp
                source += uint64(1)
            if bad:
                return rows[i] * num_layers + layer
    return -1


@kernel
def put_sets(gaps_LKR: Any, valid_R: Any, num_experts: Any, out_RLK: Any) -> Any:
    """Put sets into their rows, ids ascending: the first gap is the first id, id k is id k - 1 + 1 + gap k.

    Rows without a route get zeros. Returns whether their gaps are zeros too, and all ids are below E.

    Args:
        gaps_LKR: uint8 or uint16 [L, K, R].
        valid_R: bool [R], the routed rows.
        num_experts: E.
        out_RLK: uint8 or uint16 [R, L, K], written.
    """
    num_layers, top_k, rows = gaps_LKR.shape
    bad = False
    for layer in range(num_layers):
        gaps_KR = gaps_LKR[layer]
        for row in range(rows):
            expert = uint64(0)
            if valid_R[row]:
                for k in range(top_k):
                    expert += uint64(gaps_KR[k, row])
                    out_RLK[row, layer, k] = expert
                    expert += uint64(1)
                bad |= expert > uint64(num_experts)
            else:
                for k in range(top_k):
                    expert |= uint64(gaps_KR[k, row])
                    out_RLK[row, layer, k] = 0
                bad |= expert != uint64(0)
    return not bad


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
    # Before each sequence, `held` has the picks of those since the last one with another start, and `flat_counts` all
    # others: two levels, because the counts of one start are few enough to stay in the cache.
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
