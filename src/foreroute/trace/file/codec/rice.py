"""The codec of sets: Rice codes of the gaps between ascending ids. Compiled; imported inside functions alone.

A payload is a stream of bits as in `trace.kernels`. Each row is a state, then its ids:

    state       v = 1: no decision; v = 2: nothing was left out; v = n + 2: a set of n ids. With z the highest bit of v:
                z bits of 0, a bit of 1, and the z low bits of v
    parameter   of a row with ids: t bits of 0 and a bit of 1. With b = bits of (num_choices // n), less 1, the row's k
                is b + t / 2 for an even t, else b - (t + 1) / 2
    ids         the gap to the id before, less 1 (the first id itself): gap >> k bits of 0, a bit of 1, k low bits

Sets of any 39 of 151,936 ids then take 3.3 % more than log2 of their number (`benchmarks decisions`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, uint64

from foreroute.kernels import kernel
from foreroute.trace.kernels import fetch

ABSENT = -1
"""The count of a row without a decision."""
MOST_PARAMETER = 30


@njit(nogil=True, inline="always")
def _highest_bit(value: Any) -> Any:
    highest = uint64(0)
    while value > uint64(1):
        value >>= uint64(1)
        highest += uint64(1)
    return highest


@njit(nogil=True, inline="always")
def _put(out: Any, position: Any, value: Any) -> None:
    """Write the bits of a value of less than 2^63 from `position` on."""
    word, offset = position >> uint64(6), position & uint64(63)
    out[word] |= value << offset
    out[word + uint64(1)] |= (value >> uint64(1)) >> (uint64(63) - offset)


@njit(nogil=True, inline="always")
def _next_one(words: Any, position: Any, end: Any) -> Any:
    """Return the position of the first 1 from `position` on, or `end` when there is none before it."""
    while position < end:
        word = words[position >> uint64(6)] >> (position & uint64(63))
        if word != uint64(0):
            while not word & uint64(1):
                word >>= uint64(1)
                position += uint64(1)
            return position
        position = (position | uint64(63)) + uint64(1)
    return end


@njit(nogil=True, inline="always")
def _parameter_code(k: Any, base: Any) -> Any:
    return (k - base) << uint64(1) if k >= base else ((base - k) << uint64(1)) - uint64(1)


@kernel
def write_sets(offsets: Any, ids: Any, valid_N: Any, rows: Any, depth: Any, layer: Any, choices: Any, out: Any) -> Any:
    """Write one set of each of some rows, and return the bits that they take.

    Args:
        offsets: int64 [N * D + 1].
        ids: int32.
        valid_N: bool [N].
        rows: int64 [R].
        depth: D.
        layer: the one to write, below D.
        choices: num_choices.
        out: uint64 zeros, 34 bits for each id, 128 for each row and two words more.
    """
    position = uint64(0)
    for i in range(len(rows)):
        first, after = offsets[rows[i] * depth + layer], offsets[rows[i] * depth + layer + 1]
        count = uint64(after - first)
        state = count + uint64(2) if valid_N[rows[i]] else uint64(1)
        bits = _highest_bit(state)
        position += bits
        _put(out, position, uint64(1) | ((state & ((uint64(1) << bits) - uint64(1))) << uint64(1)))
        position += bits + uint64(1)
        if not count:
            continue
        base = _highest_bit(uint64(choices) // count)
        # the mean gap says about which parameter is best; the neighbours are tried
        guess = _highest_bit(max(uint64(1), (uint64(ids[after - 1]) + uint64(1)) // count))
        best, least = uint64(0), uint64(0xFFFFFFFFFFFFFFFF)
        for k in range(guess - min(guess, uint64(1)), min(guess + uint64(2), uint64(MOST_PARAMETER + 1))):
            cost = _parameter_code(uint64(k), base) + count * uint64(k)
            before = uint64(0)
            for j in range(first, after):
                cost += (uint64(ids[j]) - before) >> uint64(k)
                before = uint64(ids[j]) + uint64(1)
            if cost < least:
                best, least = uint64(k), cost
        position += _parameter_code(best, base)
        _put(out, position, uint64(1))
        position += uint64(1)
        low, before = (uint64(1) << best) - uint64(1), uint64(0)
        for j in range(first, after):
            gap = uint64(ids[j]) - before
            before = uint64(ids[j]) + uint64(1)
            position += gap >> best
            _put(out, position, uint64(1) | ((gap & low) << uint64(1)))
            position += best + uint64(1)
    return position


@kernel
def read_sets(words: Any, choices: Any, counts: Any, ids: Any) -> Any:
    """Read a set for each row, safely whatever the words are; returns whether they can be what `write_sets` wrote.

    Args:
        words: uint64, one payload with its closing word; at least one word.
        choices: num_choices.
        counts: int64 [R], written: ids of each row, `ABSENT` where there is no decision.
        ids: int32, written; they must be filled.
    """
    last = uint64(max(0, len(words) - 2))
    end, position, filled = uint64(len(words) - 1) << uint64(6), uint64(0), uint64(0)
    # `filled` ids of the rows before are written. No read passes the closing word, and no write the last id.
    for i in range(len(counts)):
        one = _next_one(words, position, end)
        bits = one - position
        if one >= end or bits > uint64(31):
            return False
        state = (uint64(1) << bits) | (fetch(words, one + uint64(1), last) & ((uint64(1) << bits) - uint64(1)))
        position = one + uint64(1) + bits
        counts[i] = np.int64(state) - 2
        if state <= uint64(2):
            continue
        count = state - uint64(2)
        if count > uint64(choices) or count > uint64(len(ids)) - filled:
            return False
        one = _next_one(words, position, end)
        steps, base = one - position, _highest_bit(uint64(choices) // count)
        if one >= end or steps > uint64(2 * MOST_PARAMETER):
            return False
        position = one + uint64(1)
        down = (steps + uint64(1)) >> uint64(1)
        if steps & uint64(1) and down > base:
            return False
        k = base - down if steps & uint64(1) else base + (steps >> uint64(1))
        if k > uint64(MOST_PARAMETER):
            return False
        low, following = (uint64(1) << k) - uint64(1), uint64(0)
        for _ in range(count):
            one = _next_one(words, position, end)
            if one >= end or one - position > uint64(choices) >> k:
                return False
            chosen = following + ((one - position) << k) + (fetch(words, one + uint64(1), last) & low)
            if chosen >= uint64(choices):
                return False
            ids[filled] = chosen
            filled += uint64(1)
            following = chosen + uint64(1)
            position = one + uint64(1) + k
    if position > end or filled != uint64(len(ids)) or words[len(words) - 1] != uint64(0):
        return False
    return _next_one(words, position, end) == end and len(words) == (position + uint64(63)) // uint64(64) + uint64(1)
