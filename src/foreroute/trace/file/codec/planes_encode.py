"""Encoding for the `planes` codec: ranks by popularity, sorted per row, gaps written in prefix codes. Compiled.

A block is held as planes, [L, K, rows] flattened: plane k of a layer is the k-th pick of every row, so that one step of
a loop does the same to many rows. `stride` is the distance of two planes. `books` holds the code book of each pick, for
up to 16 picks as a tuple, which unrolls the loops over picks (`fixed.unrolled`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from foreroute.kernels import kernel

LANES = 4
"""Streams that a payload is cut into, so that a decoder can follow four at once. The format fixes the number."""
TILE = 64
"""Rows that are turned into planes at a time, so that their ids stay in a first-level cache: 24 KiB at 48 layers of 8
picks."""


@lru_cache(maxsize=8)
def comparators(size: int) -> NDArray[np.int64]:
    """Return Batcher's odd-even merge network for `size` values: pairs (low, high) in order, int64 [C, 2]."""
    pairs = []
    sorted_run = 1
    # Before each round, any `sorted_run` values from a multiple of it on are sorted; the round merges them in pairs.
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
    # The network is the same for every row, so that each comparator is one loop over two planes without a branch,
    # which the compiler turns into vector instructions.
    for c in range(len(network)):
        low_start = uint64(first + network[c, 0] * stride)
        high_start = uint64(first + network[c, 1] * stride)
        low = planes[low_start : low_start + uint64(rows)]
        high = planes[high_start : high_start + uint64(rows)]
        for i in range(rows):
            a, b = low[i], high[i]
            low[i] = min(a, b)
            high[i] = max(a, b)


@kernel
def rank_experts(
    flat_ids: Any, num_layers: Any, top_k: Any, rows: Any, ranked: Any, ranking_LE: Any, rank_LE: Any
) -> None:
    """Order the experts of each layer by how often `rows` pick them, most often first, ties by id.

    Args:
        flat_ids: uint8 or uint16, [N, L, K] flattened.
        num_layers: L.
        top_k: K.
        rows: int64 [R].
        ranked: False to keep the order of ids.
        ranking_LE: uint8 or uint16 [L, E], written: the expert of each rank.
        rank_LE: uint8 or uint16 [L, E], written: the rank of each expert.
    """
    num_experts = ranking_LE.shape[1]
    counts_LE = np.zeros((num_layers, num_experts), np.int64)
    depth = uint64(top_k)
    if ranked:
        for i in range(len(rows)):
            source = uint64(rows[i]) * uint64(num_layers) * depth
            for layer in range(num_layers):
                for _ in range(top_k):
                    counts_LE[layer, uint64(flat_ids[source])] += 1
                    source += uint64(1)
    # One number to sort by: more counts first, then lower ids. The expert is its low 16 bits, though it is negative,
    # since a count shifted by 16 leaves them alone.
    key = np.empty(num_experts, np.int64)
    for layer in range(num_layers):
        for expert in range(num_experts):
            key[expert] = expert - (counts_LE[layer, expert] << 16)
        key.sort()
        for rank in range(num_experts):
            expert = key[rank] & 65535
            ranking_LE[layer, rank] = expert
            rank_LE[layer, expert] = rank


@kernel
def count_gaps(planes: Any, num_layers: Any, stride: Any, rows: Any, books: Any, counts: Any) -> None:
    """Add the gaps of sorted planes to counts: int64 [books, gaps]."""
    for layer in range(num_layers):
        for k in range(len(books)):
            start = (layer * len(books) + k) * stride
            for i in range(rows):
                before = np.int64(planes[start - stride + i]) + 1 if k else 0
                counts[books[k], np.int64(planes[start + i]) - before] += 1


@kernel
def sorted_ranks(
    flat_ids: Any, num_layers: Any, rows: Any, rank_LE: Any, network: Any, books: Any, planes: Any, stride: Any
) -> None:
    """Look up the ranks of a block's picks and sort them per row, into planes [L, K, stride]."""
    depth, step, count = uint64(len(books)), uint64(stride), len(rows)
    for tile in range(0, count, TILE):
        for layer in range(num_layers):
            rank_of = rank_LE[layer]
            for i in range(uint64(tile), uint64(min(tile + TILE, count))):
                source = (uint64(rows[i]) * uint64(num_layers) + uint64(layer)) * depth
                target = uint64(layer) * depth * step + i
                for k in range(len(books)):
                    planes[target] = rank_of[uint64(flat_ids[source + uint64(k)])]
                    target += step
    for layer in range(num_layers):
        sort_planes(planes, layer * len(books) * stride, stride, count, network)


@kernel
def write_lanes(planes: Any, first: Any, stride: Any, rows: Any, table: Any, books: Any, stream: Any, ends: Any) -> Any:
    """Write one layer's sorted planes as four lanes of prefix codes; returns the words used.

    Codes are joined in pairs before they meet the stream: two take at most 46 bits, 11 of a code and 12 extra ones
    each.

    Args:
        planes: sorted ranks.
        first: where plane 0 of the layer starts.
        stride: distance of two planes.
        rows: of the block.
        table: uint32 [books, gaps] from `prefix_code.encoding_table`: the bits shifted left by 5, plus their number.
        books: the code book of each pick.
        stream: uint64, written; one word longer than the codes at least.
        ends: uint64 [4], written: the bit at which each lane ends.
    """
    step, quarter, top_k = uint64(stride), rows // LANES, len(books)
    # `position` bits are written. `word` is position // 64, and `current` holds the first position % 64 bits of it,
    # zeros above. `before` is 1 + the last rank, so that rank - before is the gap.
    position = word = current = uint64(0)
    for lane in range(LANES):
        stop = (lane + 1) * quarter if lane < LANES - 1 else rows
        for row in range(lane * quarter, stop):
            source = uint64(first) + uint64(row)
            before = uint64(0)
            for k in range(0, top_k, 2):
                rank = uint64(planes[source])
                entry = uint64(table[books[k], rank - before])
                before, source = rank + uint64(1), source + step
                value, size = entry >> uint64(5), entry & uint64(31)
                if k + 1 < top_k:
                    rank = uint64(planes[source])
                    entry = uint64(table[books[k + 1], rank - before])
                    before, source = rank + uint64(1), source + step
                    value |= (entry >> uint64(5)) << size
                    size += entry & uint64(31)
                offset = position & uint64(63)
                current |= value << offset
                stream[word] = current
                position += size
                if offset + size >= uint64(64):  # what did not fit; in two steps, since offset may be 0
                    word += uint64(1)
                    current = (value >> uint64(1)) >> (uint64(63) - offset)
        ends[lane] = position
    stream[word] = current
    return word + uint64(1) if position & uint64(63) else word


@kernel
def write_block(
    planes: Any, stride: Any, rows: Any, ranking_LE: Any, head: Any, table: Any, books: Any, words: Any, sizes: Any
) -> Any:
    """Write the payloads of all layers of a block, one after another; returns the words they take.

    A payload is four ends of lanes in two words, the ranking if `head` is more than 2, the stream, and a zero word.

    Args:
        planes: sorted ranks.
        stride: distance of two planes.
        rows: of the block.
        ranking_LE: uint8 or uint16 [L, E], the expert of each rank.
        head: words before the stream.
        table: as in `write_lanes`.
        books: as in `write_lanes`.
        words: uint64, written; long enough for the longest codes.
        sizes: int64 [L], written: the words of each payload.
    """
    num_layers, num_experts = ranking_LE.shape
    ends = np.zeros(4, np.uint64)
    width = 8 * ranking_LE.itemsize
    start = 0
    for layer in range(num_layers):
        words[start : start + head] = 0
        if head > 2:
            for rank in range(num_experts):
                bit = rank * width
                words[start + 2 + bit // 64] |= uint64(ranking_LE[layer, rank]) << uint64(bit % 64)
        stream = words[start + head :]
        used = write_lanes(planes, layer * len(books) * stride, stride, rows, table, books, stream, ends)
        stream[used] = 0
        words[start] = ends[0] | (ends[1] << uint64(32))
        words[start + 1] = ends[2] | (ends[3] << uint64(32))
        sizes[layer] = head + np.int64(used) + 1
        start += sizes[layer]
    return start
