"""Decoding for the `planes` codec. Compiled; `slots` is as in `planes_encode`.

Four lanes are decoded in turn, so that the processor overlaps their table look-ups. Every read is masked or clamped:
wrong bits give wrong ranks, which are noticed, and never a read or write out of place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint64

from foreroute.kernels import kernel
from foreroute.trace.file.codec.planes_encode import LANES, TILE, sort_planes
from foreroute.trace.kernels import FETCHED, fetch


@njit(nogil=True, inline="always")
def one_gap(stream: Any, last: Any, position: Any, table: Any, book: Any) -> Any:
    """Any gap, extra bits included: (position after it, gap)."""
    bits = fetch(stream, position, last)
    entry = uint64(table[(uint64(book) << uint64(11)) | (bits & uint64(2047))])
    length, extra = entry & uint64(255), (entry >> uint64(8)) & uint64(255)
    rest = (bits >> length) & ((uint64(1) << extra) - uint64(1))
    return position + length + extra, (entry >> uint64(16)) + rest


@njit(nogil=True, inline="always")
def short_step(bits: Any, total: Any, table: Any, book: Any, order: Any, planes: Any, place: Any) -> Any:
    """One gap without extra bits: the remaining bits, and the sum of (gap << 8 | bits used) so far."""
    entry = uint64(table[book | (bits & uint64(2047))])
    total += entry
    planes[place] = order[(total >> uint64(8)) & uint64(255)]
    return bits >> (entry & uint64(63)), total + uint64(256)


@kernel
def read_row(
    stream: Any, last: Any, position: Any, table: Any, slots: Any, order: Any, planes: Any, target: Any, stride: Any
) -> Any:
    """One row of one lane, gap by gap; returns the position after it and 1 + its highest rank."""
    mask, rank, place = uint64(len(order) - 1), uint64(0), uint64(target)
    for k in range(len(slots)):
        position, gap = one_gap(stream, last, position, table, slots[k])
        rank += gap
        planes[place] = order[rank & mask]
        rank += uint64(1)
        place += uint64(stride)
    return position, rank


@kernel
def short_lanes(
    stream: Any,
    at: Any,
    row: Any,
    quarter: Any,
    table: Any,
    slots: Any,
    order: Any,
    planes: Any,
    first: Any,
    stride: Any,
) -> Any:
    """For up to 256 experts and few picks: rows of all four lanes side by side, one fetch per row and lane.

    The low byte of each total counts bits and the rest is the rank, so that one addition moves both on. It stops before
    a row that does not fit in one fetch (one in thousands): handling it here would slow the others down. Returns the
    row it stopped at and the highest 1 + rank.
    """
    last, byte, step = uint64(len(stream) - 2), uint64(255), uint64(stride)
    p0, p1, p2, p3 = at[0], at[1], at[2], at[3]
    highest = uint64(0)
    while row < quarter:
        a0 = a1 = a2 = a3 = uint64(0)
        s0 = uint64(first) + uint64(row)
        s1, s2, s3 = s0 + uint64(quarter), s0 + uint64(2 * quarter), s0 + uint64(3 * quarter)
        w0, w1 = fetch(stream, p0, last), fetch(stream, p1, last)
        w2, w3 = fetch(stream, p2, last), fetch(stream, p3, last)
        for k in range(len(slots)):
            book = uint64(k) << uint64(11)
            w0, a0 = short_step(w0, a0, table, book, order, planes, s0)
            w1, a1 = short_step(w1, a1, table, book, order, planes, s1)
            w2, a2 = short_step(w2, a2, table, book, order, planes, s2)
            w3, a3 = short_step(w3, a3, table, book, order, planes, s3)
            s0, s1, s2, s3 = s0 + step, s1 + step, s2 + step, s3 + step
        if max(max(a0 & byte, a1 & byte), max(a2 & byte, a3 & byte)) > uint64(FETCHED):
            break
        p0, p1, p2, p3 = p0 + (a0 & byte), p1 + (a1 & byte), p2 + (a2 & byte), p3 + (a3 & byte)
        highest = max(max(max(a0, a1), max(a2, a3)), highest)
        row += 1
    at[0], at[1], at[2], at[3] = p0, p1, p2, p3
    return row, highest >> uint64(8)


@kernel
def wide_lanes(
    stream: Any,
    at: Any,
    row: Any,
    quarter: Any,
    table: Any,
    slots: Any,
    order: Any,
    planes: Any,
    first: Any,
    stride: Any,
) -> Any:
    """For everything else, as `short_lanes`: a fetch for each gap, and extra bits. It never stops early."""
    step, one = uint64(quarter), uint64(1)
    last, mask = uint64(len(stream) - 2), uint64(len(order) - 1)
    p0, p1, p2, p3 = at[0], at[1], at[2], at[3]
    highest = uint64(0)
    for i in range(row, quarter):
        r0 = r1 = r2 = r3 = uint64(0)
        s0 = uint64(first) + uint64(i)
        for k in range(len(slots)):
            p0, g0 = one_gap(stream, last, p0, table, slots[k])
            p1, g1 = one_gap(stream, last, p1, table, slots[k])
            p2, g2 = one_gap(stream, last, p2, table, slots[k])
            p3, g3 = one_gap(stream, last, p3, table, slots[k])
            r0, r1, r2, r3 = r0 + g0, r1 + g1, r2 + g2, r3 + g3
            planes[s0], planes[s0 + step] = order[r0 & mask], order[r1 & mask]
            planes[s0 + step * uint64(2)], planes[s0 + step * uint64(3)] = order[r2 & mask], order[r3 & mask]
            r0, r1, r2, r3, s0 = r0 + one, r1 + one, r2 + one, r3 + one, s0 + uint64(stride)
        highest = max(max(max(r0, r1), max(r2, r3)), highest)
    at[0], at[1], at[2], at[3] = p0, p1, p2, p3
    return quarter, highest


@kernel
def read_layer(
    stream: Any,
    ends: Any,
    at: Any,
    rows: Any,
    limit: Any,
    short: Any,
    tables: Any,
    slots: Any,
    order: Any,
    planes: Any,
    first: Any,
    stride: Any,
) -> Any:
    """All rows of one layer's stream into planes; whether every rank and every lane's end is as it must be."""
    full, last = tables[1], uint64(len(stream) - 2)
    at[0], at[1], at[2], at[3] = uint64(0), ends[0], ends[1], ends[2]
    row, quarter, highest = 0, rows // LANES, uint64(0)
    while row < quarter:
        if short:
            row, top = short_lanes(stream, at, row, quarter, tables[0], slots, order, planes, first, stride)
        else:
            row, top = wide_lanes(stream, at, row, quarter, full, slots, order, planes, first, stride)
        highest = max(highest, top)
        if row < quarter:
            for lane in range(LANES):
                spot = first + lane * quarter + row
                at[lane], top = read_row(stream, last, at[lane], full, slots, order, planes, spot, stride)
                highest = max(highest, top)
            row += 1
    for spot in range(first + LANES * quarter, first + rows):
        at[LANES - 1], top = read_row(stream, last, at[LANES - 1], full, slots, order, planes, spot, stride)
        highest = max(highest, top)
    met = at[0] == ends[0] and at[1] == ends[1] and at[2] == ends[2] and at[3] == ends[3]
    return met and highest <= uint64(limit)


@kernel
def place_planes(planes: Any, stride: Any, dest: Any, columns: Any, slots: Any, out: Any, num_out: Any) -> None:
    """Planes of a block [C, K, stride] to their rows and layers of the output, tile by tile."""
    depth, step, count = uint64(len(slots)), uint64(stride), len(dest)
    for tile in range(0, count, TILE):
        for c in range(len(columns)):
            for i in range(uint64(tile), uint64(min(tile + TILE, count))):
                if dest[i] >= 0:
                    target = (uint64(dest[i]) * uint64(num_out) + uint64(columns[c])) * depth
                    source = uint64(c) * depth * step + i
                    for k in range(len(slots)):
                        out[target + uint64(k)] = planes[source]
                        source += step


@kernel
def is_permutation(order: Any, num_experts: Any, seen: Any) -> Any:
    """Whether the first E values of `order` are 0 .. E - 1 in any order; `seen` is scratch, uint8 [E]."""
    seen[:] = 0
    for rank in range(num_experts):
        expert = np.int64(order[rank])
        if expert >= num_experts or seen[expert]:
            return False
        seen[expert] = 1
    return True


@kernel
def closed(payload: Any, head: Any, rank_bytes: Any, bits: Any) -> Any:
    """Whether zeros follow the ranks, the stream of so many bits, and the payload."""
    tail = payload[len(payload) - 1]
    if bits & uint64(63):
        tail |= payload[len(payload) - 2] >> (bits & uint64(63))
    if head > 2 and rank_bytes % 8:
        tail |= payload[head - 1] >> uint64(8 * (rank_bytes % 8))
    return tail == uint64(0)


@kernel
def read_block(
    words: Any,
    starts: Any,
    sizes: Any,
    dest: Any,
    columns: Any,
    head: Any,
    num_experts: Any,
    short: Any,
    tables: Any,
    slots: Any,
    network: Any,
    order: Any,
    planes: Any,
    out: Any,
    num_out: Any,
) -> Any:
    """The wanted layers of a block to their places; returns -1, or the number of the first damaged one."""
    rows, ends, at = len(dest), np.zeros(4, np.uint64), np.zeros(4, np.uint64)
    seen = np.zeros(num_experts, np.uint8)
    width, half = uint64(8 * order.itemsize), uint64(0xFFFFFFFF)
    for rank in range(num_experts):
        order[rank] = rank
    for c in range(len(starts)):
        payload = words[starts[c] : starts[c] + sizes[c]]
        ends[0], ends[1] = payload[0] & half, payload[0] >> uint64(32)
        ends[2], ends[3] = payload[1] & half, payload[1] >> uint64(32)
        if np.int64(ends[3] + uint64(63)) // 64 + head + 1 != len(payload):
            return c
        if not closed(payload, head, num_experts * order.itemsize, ends[3]):
            return c
        if head > 2:
            for rank in range(num_experts):
                bit = uint64(rank) * width
                expert = payload[uint64(2) + (bit >> uint64(6))] >> (bit & uint64(63))
                order[rank] = expert & uint64(len(order) - 1)
            if not is_permutation(order, num_experts, seen):
                return c
        first = c * len(slots) * rows
        if not read_layer(
            payload[head:], ends, at, rows, num_experts, short, tables, slots, order, planes, first, rows
        ):
            return c
        sort_planes(planes, first, rows, rows, network)
    place_planes(planes, rows, dest, columns, slots, out, num_out)
    return -1
