"""Decoding for the `planes` codec. Compiled; planes and `books` are as in `planes_encode`.

    read_block          a payload: ends of lanes, ranking, zeros where they must be
      read_layer        all rows of a layer: four quarters side by side, then the rows left over
        short_lanes     up to 256 experts and 10 picks: one fetch of 64 bits per row and lane
        wide_lanes      every other model: one fetch per gap
        read_row        one row alone
      place_planes      planes to rows of the output

A code is found by looking up the next 11 bits of the stream, and the next code begins where it ends: one look-up waits
for the other. Four lanes are decoded in turn, so that the processor overlaps theirs.

The bits come from a file. No branch asks whether they can be right: every index that is made of them is masked or
clamped, so that wrong bits give wrong ranks and wrong ends, and never a read or write out of place. Both are noticed
when the layer is done: the highest rank is below E, and each lane ends where the payload says.
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
    """Read any gap, extra bits included: (position after it, gap).

    An entry of `table` is the first gap of a symbol << 16 | its extra bits << 8 | the bits of its code.
    """
    bits = fetch(stream, position, last)
    entry = uint64(table[(uint64(book) << uint64(11)) | (bits & uint64(2047))])
    length, extra = entry & uint64(255), (entry >> uint64(8)) & uint64(255)
    rest = (bits >> length) & ((uint64(1) << extra) - uint64(1))
    return position + length + extra, (entry >> uint64(16)) + rest


@njit(nogil=True, inline="always")
def short_step(bits: Any, total: Any, table: Any, book: Any, ranking: Any, planes: Any, place: Any) -> Any:
    """Read one gap without extra bits: the remaining bits, and the total with it.

    An entry of `table` is gap << 8 | bits of the code. The total is 1 + the last rank, << 8, plus the bits used so far:
    one addition moves both on. They are 110 at most, 10 picks of 11 bits, and never carry into the rank.
    """
    entry = uint64(table[book | (bits & uint64(2047))])
    total += entry
    planes[place] = ranking[(total >> uint64(8)) & uint64(255)]
    return bits >> (entry & uint64(63)), total + uint64(256)


@kernel
def read_row(
    stream: Any, last: Any, position: Any, table: Any, books: Any, ranking: Any, planes: Any, target: Any, stride: Any
) -> Any:
    """Read one row of one lane, gap by gap; returns the position after it and 1 + its highest rank."""
    # `ranking` has a power of two of entries, 256 or 65,536, so that masked ranks are in it
    mask, rank, place = uint64(len(ranking) - 1), uint64(0), uint64(target)
    for k in range(len(books)):
        position, gap = one_gap(stream, last, position, table, books[k])
        rank += gap
        planes[place] = ranking[rank & mask]
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
    books: Any,
    ranking: Any,
    planes: Any,
    first: Any,
    stride: Any,
) -> Any:
    """Read rows of four lanes side by side, one fetch per row and lane: up to 256 experts, few picks.

    It stops before a row whose codes take more than 64 bits in some lane (one in thousands): handling it here would
    slow the others down. Book k codes pick k, since there are no more than 16 picks.

    Args:
        stream: uint64, the lanes and a zero word.
        at: uint64 [4], the bit at which the next row of each lane begins; moved on.
        row: the first row of each quarter that is not decoded yet.
        quarter: rows in each.
        table: uint16, from `prefix_code.decoding_tables`.
        books: of length K.
        ranking: the expert of each rank, 256 entries.
        planes: written.
        first: where plane 0 of the layer starts.
        stride: distance of two planes.

    Returns:
        The row it stopped at, and the highest 1 + rank.
    """
    last, byte, step = uint64(len(stream) - 2), uint64(255), uint64(stride)
    p0, p1, p2, p3 = at[0], at[1], at[2], at[3]
    highest = uint64(0)
    # Rows below `row` of each quarter are decoded, lane j goes on at bit pj, and `highest` is of those rows.
    while row < quarter:
        a0 = a1 = a2 = a3 = uint64(0)
        s0 = uint64(first) + uint64(row)
        s1, s2, s3 = s0 + uint64(quarter), s0 + uint64(2 * quarter), s0 + uint64(3 * quarter)
        w0, w1 = fetch(stream, p0, last), fetch(stream, p1, last)
        w2, w3 = fetch(stream, p2, last), fetch(stream, p3, last)
        for k in range(len(books)):
            book = uint64(k) << uint64(11)
            w0, a0 = short_step(w0, a0, table, book, ranking, planes, s0)
            w1, a1 = short_step(w1, a1, table, book, ranking, planes, s1)
            w2, a2 = short_step(w2, a2, table, book, ranking, planes, s2)
            w3, a3 = short_step(w3, a3, table, book, ranking, planes, s3)
            s0, s1, s2, s3 = s0 + step, s1 + step, s2 + step, s3 + step
        # Past the fetched bits zeros were read. Bits used only grow, so that no more than 64 means none of those; else
        # nothing is moved on, and `read_row` writes this row again.
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
    books: Any,
    ranking: Any,
    planes: Any,
    first: Any,
    stride: Any,
) -> Any:
    """Do the same for every other model: a fetch for each gap, and extra bits. It never stops early."""
    step, one = uint64(quarter), uint64(1)
    last, mask = uint64(len(stream) - 2), uint64(len(ranking) - 1)
    p0, p1, p2, p3 = at[0], at[1], at[2], at[3]
    highest = uint64(0)
    # Rows below i of each quarter are decoded, and lane j goes on at bit pj. Within a row, rj is 1 + the last rank.
    for i in range(row, quarter):
        r0 = r1 = r2 = r3 = uint64(0)
        s0 = uint64(first) + uint64(i)
        for k in range(len(books)):
            p0, g0 = one_gap(stream, last, p0, table, books[k])
            p1, g1 = one_gap(stream, last, p1, table, books[k])
            p2, g2 = one_gap(stream, last, p2, table, books[k])
            p3, g3 = one_gap(stream, last, p3, table, books[k])
            r0, r1, r2, r3 = r0 + g0, r1 + g1, r2 + g2, r3 + g3
            planes[s0], planes[s0 + step] = ranking[r0 & mask], ranking[r1 & mask]
            planes[s0 + step * uint64(2)], planes[s0 + step * uint64(3)] = ranking[r2 & mask], ranking[r3 & mask]
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
    books: Any,
    ranking: Any,
    planes: Any,
    first: Any,
    stride: Any,
) -> Any:
    """Read all rows of one layer into planes; returns whether every rank and every lane's end is as it must be.

    Args:
        stream: uint64, the lanes and a zero word.
        ends: uint64 [4], the bit at which each lane ends, as the payload says; unchecked.
        at: uint64 [4], scratch.
        rows: R.
        limit: E.
        short: whether `short_lanes` can be used.
        tables: both of `prefix_code.decoding_tables`.
        books: the code book of each pick.
        ranking: the expert of each rank.
        planes: written.
        first: where plane 0 of the layer starts.
        stride: distance of two planes.
    """
    full, last = tables[1], uint64(len(stream) - 2)
    at[0], at[1], at[2], at[3] = uint64(0), ends[0], ends[1], ends[2]
    # Before each step, rows below `row` of all four quarters are decoded, and lane j goes on at bit at[j]. It began
    # where the lane before it must end, so that the lanes lie without space between them if all ends are met.
    row, quarter, highest = 0, rows // LANES, uint64(0)
    while row < quarter:
        if short:
            row, top = short_lanes(stream, at, row, quarter, tables[0], books, ranking, planes, first, stride)
        else:
            row, top = wide_lanes(stream, at, row, quarter, full, books, ranking, planes, first, stride)
        highest = max(highest, top)
        if row < quarter:
            for lane in range(LANES):
                spot = first + lane * quarter + row
                at[lane], top = read_row(stream, last, at[lane], full, books, ranking, planes, spot, stride)
                highest = max(highest, top)
            row += 1
    # the last lane has the rows left over too
    for spot in range(first + LANES * quarter, first + rows):
        at[LANES - 1], top = read_row(stream, last, at[LANES - 1], full, books, ranking, planes, spot, stride)
        highest = max(highest, top)
    met = at[0] == ends[0] and at[1] == ends[1] and at[2] == ends[2] and at[3] == ends[3]
    return met and highest <= uint64(limit)


@kernel
def place_planes(planes: Any, stride: Any, dest: Any, out_layers: Any, books: Any, out: Any, num_out: Any) -> None:
    """Copy the planes of a block [C, K, stride] to their rows and layers of the output.

    Tile by tile, so that the output of a tile stays in the cache while all its layers are written.
    """
    depth, step, count = uint64(len(books)), uint64(stride), len(dest)
    for tile in range(0, count, TILE):
        for c in range(len(out_layers)):
            for i in range(uint64(tile), uint64(min(tile + TILE, count))):
                if dest[i] >= 0:
                    target = (uint64(dest[i]) * uint64(num_out) + uint64(out_layers[c])) * depth
                    source = uint64(c) * depth * step + i
                    for k in range(len(books)):
                        out[target + uint64(k)] = planes[source]
                        source += step


@kernel
def is_permutation(ranking: Any, num_experts: Any, seen: Any) -> Any:
    """Say whether the first E values of `ranking` are 0 .. E - 1 in any order; `seen` is scratch, uint8 [E]."""
    seen[:] = 0
    for rank in range(num_experts):
        expert = np.int64(ranking[rank])
        if expert >= num_experts or seen[expert]:
            return False
        seen[expert] = 1
    return True


@kernel
def closed(payload: Any, head: Any, rank_bytes: Any, bits: Any) -> Any:
    """Say whether zeros follow the ranks, the stream of so many bits, and the payload."""
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
    out_layers: Any,
    head: Any,
    num_experts: Any,
    short: Any,
    tables: Any,
    books: Any,
    network: Any,
    ranking: Any,
    planes: Any,
    out: Any,
    num_out: Any,
) -> Any:
    """Put the wanted layers of a block into place; returns -1, or the number of the first damaged one.

    Args:
        words: uint64 [Z].
        starts: int64 [C], where the payload of each wanted layer begins.
        sizes: int64 [C], its words, `head` + 2 at least.
        dest: int64 [R], the output row of each row, or -1.
        out_layers: int64 [C], the output layer of each wanted layer.
        head: words before the stream: 2, and the ranking if the payload has one.
        num_experts: E.
        short: whether `short_lanes` can be used.
        tables: both of `prefix_code.decoding_tables`.
        books: the code book of each pick.
        network: int64, from `comparators`.
        ranking: scratch, 256 entries of uint8 or 65,536 of uint16.
        planes: scratch, [C, K, R] flattened.
        out: uint8 or uint16, [N, L', K] flattened, written.
        num_out: L'.
    """
    rows, ends, at = len(dest), np.zeros(4, np.uint64), np.zeros(4, np.uint64)
    seen = np.zeros(num_experts, np.uint8)
    width, half = uint64(8 * ranking.itemsize), uint64(0xFFFFFFFF)
    for rank in range(num_experts):  # without a ranking in the payloads, rank is id
        ranking[rank] = rank
    # Before a layer is decoded its words are known to be as many as its lanes' ends ask for, and `ranking` to be a
    # permutation; `read_layer` then says whether ranks and ends came out right.
    for c in range(len(starts)):
        payload = words[starts[c] : starts[c] + sizes[c]]
        ends[0], ends[1] = payload[0] & half, payload[0] >> uint64(32)
        ends[2], ends[3] = payload[1] & half, payload[1] >> uint64(32)
        if np.int64(ends[3] + uint64(63)) // 64 + head + 1 != len(payload):
            return c
        if not closed(payload, head, num_experts * ranking.itemsize, ends[3]):
            return c
        if head > 2:
            for rank in range(num_experts):
                bit = uint64(rank) * width
                expert = payload[uint64(2) + (bit >> uint64(6))] >> (bit & uint64(63))
                ranking[rank] = expert & uint64(len(ranking) - 1)
            if not is_permutation(ranking, num_experts, seen):
                return c
        first = c * len(books) * rows
        if not read_layer(
            payload[head:], ends, at, rows, num_experts, short, tables, books, ranking, planes, first, rows
        ):
            return c
        sort_planes(planes, first, rows, rows, network)  # ranks ascended; ids need not
    place_planes(planes, rows, dest, out_layers, books, out, num_out)
    return -1
