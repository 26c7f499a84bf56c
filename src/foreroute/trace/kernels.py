"""Compiled loops over all picks of a trace: the check, the counts, and sets that are read from a file.

Other files import from here inside functions alone: numba is slow to load. Arithmetic on positions is in uint64: numba
makes a float of an int64 and a uint64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import uint64

from foreroute.kernels import kernel, routine

TILE_ROWS = 1024
"""Rows that are sorted or summed up at once. Their ids in all layers, or in planes about as many, fit the second-level
cache. Shorter pieces of L · K planes take longer: each begins in a page of its own (256 took up to twice 1,024)."""


_IN_EACH_BYTE, _LOW_BITS, _HIGH_BITS = (uint64(byte * 0x0101010101010101) for byte in (1, 0x7F, 0x80))


@kernel
def are_sets_of_eight(
    picks_NL: Any,  # uint64 [N, L], each of eight ids of one byte
    valid_N: Any,  # bool [N]; rows where it is False are not looked at
    num_experts: Any,  # E
) -> Any:
    """Say whether all picks of routed rows are eight different ids below E, many layers at a time."""
    # A byte of E or more: its lower bits and this number reach the highest bit, which stands for 128. Up to 128 experts
    # that bit tells by itself too; above, both must be there.
    reach = uint64((128 if num_experts <= 128 else 256) - num_experts) * _IN_EACH_BYTE
    either = uint64(0xFFFFFFFFFFFFFFFF) if num_experts <= 128 else uint64(0)
    for row in range(len(picks_NL)):
        if valid_N[row]:
            bad = uint64(0)
            for layer in range(picks_NL.shape[1]):
                word = picks_NL[row, layer]
                carried = (word & _LOW_BITS) + reach
                bad |= (word & carried) | ((word | carried) & either)
                # Turned by one to four bytes, each byte has met each other; two that are alike leave a byte of zeros,
                # from which one is borrowed.
                for turn in (uint64(8), uint64(16), uint64(24), uint64(32)):
                    met = word ^ ((word << turn) | (word >> (uint64(64) - turn)))
                    bad |= (met - _IN_EACH_BYTE) & ~met
            if bad & _HIGH_BITS:
                return False
    return True


@kernel
def first_bad_picks(
    flat_ids: Any,  # uint8 or uint16, [N, L, K] flattened
    num_layers: Any,
    top_k: Any,
    rows: Any,  # int64 [R]
    num_experts: Any,
) -> Any:
    """Find the first (row, layer) of `rows` with an id of E or more or an expert twice: row * L + layer, or -1."""
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
def gaps_of_rows(
    ids_RLK: Any,  # uint8 or uint16 [R, L, K]; anything in rows without a route
    valid_R: Any,  # bool [R], the routed rows
    num_experts: Any,  # E
    gaps_LKR: Any,  # of the same type [L, K, R], written
) -> Any:
    """Write the gaps between the sorted ids of each row, and say whether all are different and below E.

    Gap 0 is id 0, gap k is id k less id k - 1 less 1; rows without a route get zeros.
    """
    num_layers, top_k, rows = gaps_LKR.shape
    ids_KR = np.empty((top_k, TILE_ROWS), gaps_LKR.dtype)
    # The first distance of exchanges: the largest power of two below K, or 1.
    top = 1
    while 2 * top < top_k:
        top *= 2
    bad = False
    for start in range(0, rows, TILE_ROWS):
        stop = min(start + TILE_ROWS, rows)
        count, valid = stop - start, valid_R[start:stop]
        for layer in range(num_layers):
            _take_columns(ids_RLK[start:stop, layer], valid, ids_KR)
            # Batcher's merge exchange for any number of keys: Knuth, The Art of Computer Programming, vol. 3, 5.2.2, M.
            # A sorting network is a fixed list of exchanges, so that each is done for all rows at once. p, q, r and d
            # are Knuth's: distances that are halved from pass to pass.
            p = top
            while p > 0:
                q, r, d = top, 0, p
                while d > 0:
                    for i in range(top_k - d):
                        if i & p == r:
                            _exchange(ids_KR[i, :count], ids_KR[i + d, :count])
                    d, q, r = q - p, q // 2, p
                p //= 2
            gaps_LKR[layer, 0, start:stop] = ids_KR[0, :count]
            for k in range(1, top_k):
                bad |= _take_gaps(ids_KR[k - 1, :count], ids_KR[k, :count], valid, gaps_LKR[layer, k, start:stop])
            bad |= _leaves_range(ids_KR[top_k - 1, :count], valid, num_experts)
    return not bad


@kernel
def put_sets(
    gaps_LKR: Any,  # uint8 or uint16 [L, K, R], as `gaps_of_rows` writes them
    valid_R: Any,  # bool [R], the routed rows
    num_experts: Any,  # E
    out_RLW: Any,  # uint8 to uint64 [R, L, W], written: the K ids as W words, the first id of a word in its lowest bits
) -> Any:
    """Put sets into their rows, ids ascending, and say whether all are below E and rows without a route have zeros."""
    num_layers, top_k, rows = gaps_LKR.shape
    ids_KR, words = np.empty((top_k, TILE_ROWS), gaps_LKR.dtype), np.empty(TILE_ROWS, out_RLW.dtype)
    per_word, bits = out_RLW.itemsize // gaps_LKR.itemsize, 8 * gaps_LKR.itemsize
    bad = False
    # All layers of a tile of rows, and then the next tile.
    for start in range(0, rows, TILE_ROWS):
        stop = min(start + TILE_ROWS, rows)
        count, valid = stop - start, valid_R[start:stop]
        for layer in range(num_layers):
            ids_KR[0, :count] = gaps_LKR[layer, 0, start:stop]
            for k in range(1, top_k):
                bad |= _add_gaps(ids_KR[k - 1, :count], gaps_LKR[layer, k, start:stop], valid, ids_KR[k, :count])
            bad |= _leaves_range(ids_KR[top_k - 1, :count], valid, num_experts)
            # Rows lie far apart: what goes into one is put together first, and written by whole words.
            for w in range(top_k // per_word):
                words[:count] = ids_KR[w * per_word, :count]
                for k in range(1, per_word):
                    _append(ids_KR[w * per_word + k, :count], k * bits, words[:count])
                out = out_RLW[start:stop, layer, w]
                for row in range(count):
                    out[row] = words[row]
    return not bad


# One pick of all rows of a tile. The compiler makes vectors of these loops, and would not of the same loops within the
# kernels. `valid` is 1 for a routed row, where neighbours differ by 1 at least, and 0 for one without a route.


@routine
def _take_columns(ids_RK: Any, valid: Any, ids_KR: Any) -> None:
    """Turn rows into columns, with zeros for rows without a route."""
    for row in range(len(ids_RK)):
        for k in range(ids_RK.shape[1]):
            ids_KR[k, row] = ids_RK[row, k]
    for row in range(len(ids_RK)):
        if not valid[row]:
            ids_KR[:, row] = 0


@routine
def _exchange(low: Any, high: Any) -> None:
    """Put the smaller number of each pair into `low`, and the other into `high`."""
    for row in range(len(low)):
        smaller = min(low[row], high[row])
        high[row] = max(low[row], high[row])
        low[row] = smaller


@routine
def _take_gaps(low: Any, high: Any, valid: Any, gaps: Any) -> bool:
    """Take the gaps between sorted neighbours, and say whether two of them are the same expert."""
    bad = False
    for row in range(len(low)):
        gaps[row] = high[row] - low[row] - valid[row]
    for row in range(len(low)):
        bad |= (high[row] == low[row]) & valid[row]
    return bad


@routine
def _add_gaps(low: Any, gaps: Any, valid: Any, high: Any) -> bool:
    """Put the ids that lie by these gaps above others into `high`, and say whether one has left its type."""
    bad = False
    for row in range(len(low)):
        high[row] = low[row] + gaps[row] + valid[row]
    # An id that left its type has wrapped, and is no longer above the one before.
    for row in range(len(low)):
        bad |= (high[row] < low[row]) | ((high[row] == low[row]) & valid[row])
    return bad


@routine
def _append(ids: Any, shift: Any, words: Any) -> None:
    """Put ids into words, that many bits from the lowest."""
    for row in range(len(ids)):
        words[row] |= uint64(ids[row]) << uint64(shift)


@routine
def _leaves_range(last: Any, valid: Any, num_experts: Any) -> bool:
    """Say whether the last id of a row is E or more, or that of a row without a route is not 0."""
    bad = False
    for row in range(len(last)):
        bad |= (last[row] >= num_experts) | ((last[row] != 0) & (not valid[row]))
    return bad


@kernel
def add_counts(
    flat_ids: Any,  # uint8 or uint16, [N, L, K] flattened
    valid_N: Any,  # bool [N]
    offsets: Any,  # int64 [S + 1]
    order: Any,  # int64, sequence numbers; those of one start are neighbours
    start_S: Any,  # int64 [S], where the counts of each sequence begin in `flat_counts`
    layer_L: Any,  # int64 [L], from there to those of each layer
    # uint32 [L, E] of zeros, and zeros again afterwards: small enough for the first-level cache, and free of the
    # collisions in it that a large power of two between layers would cause
    held_LE: Any,
    flat_counts: Any,  # int32, added to
) -> None:
    """Count the picks of some sequences."""
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
                target = start_S[s] + layer_L[layer]
                for e in range(num_experts):
                    flat_counts[target + e] += np.int32(held_LE[layer, e])
            held[:] = 0
