"""Loops over all picks of a trace: the check, the counts, and picks as numbers of a fixed width. Compiled.

Other files import from here inside functions alone: numba is slow to load.

A stream of bits lies in 64-bit words, bit b at bit b % 64 of word b // 64, and is followed by one zero word. So 64 bits
from any position on are two neighbouring words, without a test for the end. Arithmetic is in uint64 throughout: numba
makes a float of an int64 and a uint64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint64

from foreroute.kernels import kernel

FETCHED = 64
"""Bits that one `fetch` brings."""


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


@njit(nogil=True, inline="always")
def fetch(words: Any, position: Any, last: Any) -> Any:
    """Return 64 bits from `position` on; `last` is the index of the word before the closing zero word."""
    # Positions come from files. One past the end is clamped: its bits are wrong, and index + 1 is still a word.
    index = min(position >> uint64(6), last)
    shift = position & uint64(63)
    # The second word is shifted by 64 - shift in two steps, since a shift by 64 at once has no defined result.
    return (words[index] >> shift) | ((words[index + uint64(1)] << uint64(1)) << (uint64(63) - shift))


@kernel
def pack_rows(flat_ids: Any, num_layers: Any, top_k: Any, rows: Any, bits: Any, words_LW: Any) -> None:
    """Write the picks of `rows` as `bits` bits each into one zeroed stream per layer.

    Args:
        flat_ids: uint8 or uint16, [N, L, K] flattened.
        num_layers: L.
        top_k: K.
        rows: int64 [R].
        bits: 1 to 16.
        words_LW: uint64 [L, W], zeros, W at least one word longer than the stream.
    """
    depth, width = uint64(top_k), uint64(bits)
    chunk = uint64(FETCHED) // width
    for i in range(len(rows)):
        source = uint64(rows[i]) * uint64(num_layers) * depth
        for layer in range(num_layers):
            position = uint64(i) * depth * width
            k = uint64(0)
            # The first k picks of the row end at `position`. As many as fill a word at most are joined, then written.
            while k < depth:
                stop = min(k + chunk, depth)
                value = uint64(0)
                shift = uint64(0)
                while k < stop:
                    value |= uint64(flat_ids[source + k]) << shift
                    shift += width
                    k += uint64(1)
                word, offset = position >> uint64(6), position & uint64(63)
                words_LW[layer, word] |= value << offset
                words_LW[layer, word + uint64(1)] |= (value >> uint64(1)) >> (uint64(63) - offset)
                position += shift
            source += depth


@kernel(_nrt=False)
def unpack_rows(
    words: Any,
    starts: Any,
    size: Any,
    dest: Any,
    bits: Any,
    num_experts: Any,
    out_layers: Any,
    picks: Any,
    out: Any,
    num_out: Any,
    seen: Any,
) -> Any:
    """Put rows written by `pack_rows` into their places.

    Returns whether all ids are below E and distinct in their row, and nothing but zeros follows the last one.

    Args:
        words: uint64 [Z], the payloads of one block.
        starts: int64 [C], where the payload of each wanted layer begins in `words`.
        size: words per payload, the closing zero word included.
        dest: int64 [R], the output row of each stored row, or -1 for a row that is not wanted.
        bits: 1 to 16.
        num_experts: E.
        out_layers: int64 [C], the output layer of each wanted layer.
        picks: of length K; a tuple, whose length is known when this is compiled, unrolls the loops.
        out: uint8 or uint16, [N, L', K] flattened.
        num_out: L'.
        seen: int64 zeros, one for each id of so many bits. It is handed in because making an array takes as long to
            compile as half of this.
    """
    width, last, depth = uint64(bits), uint64(size - 2), uint64(len(picks))
    # whether one fetch brings all picks of a row
    whole, mask = len(picks) * bits <= FETCHED, (uint64(1) << width) - uint64(1)
    stamp, bad = 0, False  # as in `first_bad_picks`
    used = uint64(len(dest)) * depth * width
    for c in range(len(starts)):
        tail = words[starts[c] + size - 2] >> (used & uint64(63)) if used & uint64(63) else uint64(0)
        bad |= (tail | words[starts[c] + size - 1]) != uint64(0)
    # Whatever the words are, reads stay within their payload and writes within the rows of `dest`; `bad` is looked at
    # once, at the end, so that the loop has no exit.
    for i in range(len(dest)):
        if dest[i] < 0:
            continue
        for c in range(len(starts)):
            stream = words[starts[c] : starts[c] + size]
            target = (uint64(dest[i]) * uint64(num_out) + uint64(out_layers[c])) * depth
            position = uint64(i) * depth * width
            value = fetch(stream, position, last)
            stamp += 1
            for k in range(len(picks)):
                if not whole:
                    value = fetch(stream, position, last)
                    position += width
                expert = value & mask
                value >>= width
                bad |= (seen[expert] == stamp) | (expert >= uint64(num_experts))
                seen[expert] = stamp
                out[target + uint64(k)] = expert
    return not bad


@kernel
def scan_counts(counts_CE: Any, least_C: Any, total_C: Any) -> None:
    """Smallest entry and total of each row of int32 [C, E]; both int64 [C], written."""
    for c in range(counts_CE.shape[0]):
        least, total = np.int32(0), np.int64(0)
        for e in range(counts_CE.shape[1]):
            least = min(least, counts_CE[c, e])
            total += counts_CE[c, e]
        least_C[c], total_C[c] = least, total
