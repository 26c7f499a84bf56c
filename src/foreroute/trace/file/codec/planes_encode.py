"""Encoding for the `planes` codec: ranks by popularity, sorted per row, gaps written in prefix codes. Compiled.

`slots` holds the code book of each pick, for up to 16 picks as a tuple: its length is part of its type, so that the
loops over picks are compiled with a known length and unroll.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from foreroute.kernels import kernel

LANES = 4
TILE = 64


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


@kernel
def rank_experts(
    flat_ids: Any, num_layers: Any, top_k: Any, rows: Any, ranked: Any, order_LE: Any, rank_LE: Any
) -> None:
    """Order the experts of each layer by how often `rows` pick them, most often first, ties by id.

    Args:
        flat_ids: uint8 or uint16, [N, L, K] flattened.
        num_layers: L.
        top_k: K.
        rows: int64 [R].
        ranked: False to keep the order of ids.
        order_LE: uint8 or uint16 [L, E], written: the expert of each rank.
        rank_LE: uint8 or uint16 [L, E], written: the rank of each expert.
    """
    num_experts = order_LE.shape[1]
    counts_LE = np.zeros((num_layers, num_experts), np.int64)
    depth = uint64(top_k)
    if ranked:
        for i in range(len(rows)):
            source = uint64(rows[i]) * uint64(num_layers) * depth
            for layer in range(num_layers):
                for _ in range(top_k):
                    counts_LE[layer, uint64(flat_ids[source])] += 1
                    source += uint64(1)
    key = np.empty(num_experts, np.int64)
    for layer in range(num_layers):
        for expert in range(num_experts):
            key[expert] = expert - (counts_LE[layer, expert] << 16)
        key.sort()
        for rank in range(num_experts):
            expert = key[rank] & 65535
            order_LE[layer, rank] = expert
            rank_LE[layer, expert] = rank


@kernel
def count_gaps(planes: Any, num_layers: Any, stride: Any, rows: Any, slots: Any, counts: Any) -> None:
    """Add the gaps of sorted planes to counts: int64 [books, gaps]."""
    for layer in range(num_layers):
        for k in range(len(slots)):
            start = (layer * len(slots) + k) * stride
            for i in range(rows):
                before = np.int64(planes[start - stride + i]) + 1 if k else 0
                counts[slots[k], np.int64(planes[start + i]) - before] += 1


@kernel
def sorted_ranks(
    flat_ids: Any, num_layers: Any, rows: Any, rank_LE: Any, network: Any, slots: Any, planes: Any, stride: Any
) -> None:
    """Look up the ranks of a block's picks and sort them per row, into planes [L, K, stride]."""
    depth, step, count = uint64(len(slots)), uint64(stride), len(rows)
    for tile in range(0, count, TILE):
        for layer in range(num_layers):
            rank_of = rank_LE[layer]
            for i in range(uint64(tile), uint64(min(tile + TILE, count))):
                source = (uint64(rows[i]) * uint64(num_layers) + uint64(layer)) * depth
                target = uint64(layer) * depth * step + i
                for k in range(len(slots)):
                    planes[target] = rank_of[uint64(flat_ids[source + uint64(k)])]
                    target += step
    for layer in range(num_layers):
        sort_planes(planes, layer * len(slots) * stride, stride, count, network)


@kernel
def write_lanes(planes: Any, first: Any, stride: Any, rows: Any, table: Any, slots: Any, stream: Any, ends: Any) -> Any:
    """Write one layer's sorted planes as four lanes of prefix codes; returns the words used.

    Codes are joined in pairs before they meet the stream: two take at most 46 bits.
    """
    step, quarter, top_k = uint64(stride), rows // LANES, len(slots)
    position = word = current = uint64(0)
    for lane in range(LANES):
        stop = (lane + 1) * quarter if lane < LANES - 1 else rows
        for row in range(lane * quarter, stop):
            source = uint64(first) + uint64(row)
            before = uint64(0)
            for k in range(0, top_k, 2):
                rank = uint64(planes[source])
                entry = uint64(table[slots[k], rank - before])
                before, source = rank + uint64(1), source + step
                value, size = entry >> uint64(5), entry & uint64(31)
                if k + 1 < top_k:
                    rank = uint64(planes[source])
                    entry = uint64(table[slots[k + 1], rank - before])
                    before, source = rank + uint64(1), source + step
                    value |= (entry >> uint64(5)) << size
                    size += entry & uint64(31)
                offset = position & uint64(63)
                current |= value << offset
                stream[word] = current
                position += size
                if offset + size >= uint64(64):
                    word += uint64(1)
                    current = (value >> uint64(1)) >> (uint64(63) - offset)
        ends[lane] = position
    stream[word] = current
    return word + uint64(1) if position & uint64(63) else word


@kernel
def write_block(
    planes: Any, stride: Any, rows: Any, order_LE: Any, head: Any, table: Any, slots: Any, words: Any, sizes: Any
) -> Any:
    """The payloads of all layers of a block, one after another; returns the words they take."""
    num_layers, num_experts = order_LE.shape
    ends = np.zeros(4, np.uint64)
    width = 8 * order_LE.itemsize
    start = 0
    for layer in range(num_layers):
        words[start : start + head] = 0
        if head > 2:
            for rank in range(num_experts):
                bit = rank * width
                words[start + 2 + bit // 64] |= uint64(order_LE[layer, rank]) << uint64(bit % 64)
        stream = words[start + head :]
        used = write_lanes(planes, layer * len(slots) * stride, stride, rows, table, slots, stream, ends)
        stream[used] = 0
        words[start] = ends[0] | (ends[1] << uint64(32))
        words[start + 1] = ends[2] | (ends[3] << uint64(32))
        sizes[layer] = head + np.int64(used) + 1
        start += sizes[layer]
    return start
