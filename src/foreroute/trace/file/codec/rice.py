"""The codecs of sets: Rice codes of the gaps between ascending ids. Compiled; imported inside functions alone.

A payload is a stream of bits as in `trace.kernels`. A number v from 1 is written, with z its highest bit, as z bits of
0, a bit of 1, and the z low bits of v. Each row is a state, then a list of ascending ids:

    state       v = 1: no decision; v = 2: nothing was left out; v = n + 2: a set of n ids
    parameter   of a list: t bits of 0 and a bit of 1. Its k is b + t / 2 for an even t, else b - (t + 1) / 2, where b
                is the bits of (num_choices // n), less 1
    ids         the gap to the id before, less 1 (the first id itself): gap >> k bits of 0, a bit of 1, k low bits

Where sets resemble those of the row before, as those of indexers do, the second codec lists what changed. It differs
in this:

    state       v = 3: a set of as many ids as the one before; v = n + 3: a set of n ids
    mode        of a set that is not the first of the payload: a bit of 1 where its list has what it or the set before
                has, and not both. The length m of that list, written as m + 1, follows
    parameter   b is that of the list before of the same mode, at first 0

A file takes 2.1 % more than log2 of the number of sets of 39 of 151,936 ids, in the second codec although they share
nothing: the length and parameter before save more than the mode costs (`benchmarks decisions`).
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


@njit(nogil=True, inline="always")
def _put_number(out: Any, position: Any, value: Any) -> Any:
    bits = _highest_bit(value)
    position += bits
    _put(out, position, uint64(1) | ((value & ((uint64(1) << bits) - uint64(1))) << uint64(1)))
    return position + bits + uint64(1)


@njit(nogil=True)
def _best_parameter(listed: Any, base: Any) -> Any:
    """Return the parameter of a list that has ids, and the bits that it then takes, less one per id and one."""
    count = uint64(len(listed))
    # the mean gap says about which parameter is best; the neighbours are tried
    guess = _highest_bit(max(uint64(1), (uint64(listed[len(listed) - 1]) + uint64(1)) // count))
    best, least = uint64(0), uint64(0xFFFFFFFFFFFFFFFF)
    for k in range(guess - min(guess, uint64(1)), min(guess + uint64(2), uint64(MOST_PARAMETER + 1))):
        cost = _parameter_code(uint64(k), base) + count * uint64(k)
        before = uint64(0)
        for each in listed:
            cost += (uint64(each) - before) >> uint64(k)
            before = uint64(each) + uint64(1)
        if cost < least:
            best, least = uint64(k), cost
    return best, least


@njit(nogil=True)
def _put_list(out: Any, position: Any, listed: Any, k: Any, base: Any) -> Any:
    position += _parameter_code(k, base)
    _put(out, position, uint64(1))
    position += uint64(1)
    low, before = (uint64(1) << k) - uint64(1), uint64(0)
    for each in listed:
        gap = uint64(each) - before
        before = uint64(each) + uint64(1)
        position += gap >> k
        _put(out, position, uint64(1) | ((gap & low) << uint64(1)))
        position += k + uint64(1)
    return position


@njit(nogil=True)
def _changes(old: Any, new: Any, out: Any) -> Any:
    """Write the ids that one of two ascending lists has and the other has not, and return how many there are."""
    i, j, found = 0, 0, 0
    while i < len(old) or j < len(new):
        if j == len(new) or (i < len(old) and old[i] < new[j]):
            out[found] = old[i]
            found += 1
            i += 1
        elif i == len(old) or new[j] < old[i]:
            out[found] = new[j]
            found += 1
            j += 1
        else:
            i += 1
            j += 1
    return found


@kernel
def write_sets(
    offsets: Any, ids: Any, valid_N: Any, rows: Any, depth: Any, layer: Any, choices: Any, by_change: Any, out: Any
) -> Any:
    """Write one set of each of some rows, and return the bits that they take.

    Args:
        offsets: int64 [N * D + 1].
        ids: int32.
        valid_N: bool [N].
        rows: int64 [R].
        depth: D.
        layer: the one to write, below D.
        choices: num_choices.
        by_change: whether to use the second codec.
        out: uint64 zeros, 34 bits for each id, 128 for each row and two words more.
    """
    position, most = uint64(0), 0
    for i in range(len(rows)):
        most = max(most, offsets[rows[i] * depth + layer + 1] - offsets[rows[i] * depth + layer])
    changed, last, first_before, after_before = np.empty(2 * most, np.int32), np.zeros(2, np.uint64), 0, 0
    # The last set that had ids is ids[first_before:after_before]; the last parameter of each mode is in `last`.
    for i in range(len(rows)):
        first, after = offsets[rows[i] * depth + layer], offsets[rows[i] * depth + layer + 1]
        count, before = uint64(after - first), uint64(after_before - first_before)
        state = count + uint64(2) if valid_N[rows[i]] else uint64(1)
        if by_change and count:
            state = uint64(3) if count == before else count + uint64(3)
        position = _put_number(out, position, state)
        if not count:
            continue
        base = last[0] if by_change else _highest_bit(uint64(choices) // count)
        k, cost = _best_parameter(ids[first:after], base)
        if by_change and before:
            num_changed = _changes(ids[first_before:after_before], ids[first:after], changed)
            k_of_changes, cost_of_changes = last[1], uint64(0)
            if num_changed:
                k_of_changes, cost_of_changes = _best_parameter(changed[:num_changed], last[1])
            extra = uint64(2) * _highest_bit(uint64(num_changed + 1)) + uint64(1)
            if cost_of_changes + uint64(num_changed) + extra < cost + count:
                _put(out, position, uint64(1))
                position = _put_number(out, position + uint64(1), uint64(num_changed + 1))
                if num_changed:
                    position = _put_list(out, position, changed[:num_changed], k_of_changes, last[1])
                last[1], first_before, after_before = k_of_changes, first, after
                continue
            position += uint64(1)
        position = _put_list(out, position, ids[first:after], k, base)
        last[0], first_before, after_before = k, first, after
    return position


@njit(nogil=True, inline="always")
def _number(words: Any, position: Any, last: Any, end: Any) -> Any:
    """Return a number of at most 32 bits and the position behind it, or 0 where there is none."""
    one = _next_one(words, position, end)
    bits = one - position
    if one >= end or bits > uint64(31):
        return uint64(0), position
    low = fetch(words, one + uint64(1), last) & ((uint64(1) << bits) - uint64(1))
    return (uint64(1) << bits) | low, one + uint64(1) + bits


@njit(nogil=True)
def _parameter(words: Any, position: Any, end: Any, base: Any) -> Any:
    """Return a parameter and the position behind it, or one above `MOST_PARAMETER` where there is none."""
    one = _next_one(words, position, end)
    steps = one - position
    down = (steps + uint64(1)) >> uint64(1)
    if one >= end or steps > uint64(2 * MOST_PARAMETER) or (steps & uint64(1) and down > base):
        return uint64(MOST_PARAMETER + 1), position
    return base - down if steps & uint64(1) else base + (steps >> uint64(1)), one + uint64(1)


@kernel
def read_sets(words: Any, choices: Any, by_change: Any, counts: Any, ids: Any) -> Any:
    """Read a set for each row, safely whatever the words are; returns whether they can be what `write_sets` wrote.

    Args:
        words: uint64, one payload with its closing word; at least one word.
        choices: num_choices.
        by_change: whether they are of the second codec.
        counts: int64 [R], written: ids of each row, `ABSENT` where there is no decision.
        ids: int32, written; they must be filled.
    """
    last = uint64(max(0, len(words) - 2))
    end, position, filled = uint64(len(words) - 1) << uint64(6), uint64(0), uint64(0)
    parameters, first_before, before = np.zeros(2, np.uint64), uint64(0), uint64(0)
    # `filled` ids of the rows before are written, those of the last set from `first_before` on. No read passes the
    # closing word, and no write the last id.
    for i in range(len(counts)):
        state, position = _number(words, position, last, end)
        if state == uint64(0):
            return False
        counts[i] = np.int64(state) - 2
        if state <= uint64(2):
            continue
        count = state - uint64(2)
        if by_change:
            count = before if state == uint64(3) else state - uint64(3)
            counts[i] = count
        if count == uint64(0) or count > uint64(choices) or count > uint64(len(ids)) - filled:
            return False
        changes, num_listed = False, count
        if by_change and before:
            changes = bool(fetch(words, position, last) & uint64(1))
            position += uint64(1)
            if changes:
                num_listed, position = _number(words, position, last, end)
                if num_listed == uint64(0) or num_listed - uint64(1) > count + before:
                    return False
                num_listed -= uint64(1)
        mode = 1 if changes else 0
        base = parameters[mode] if by_change else _highest_bit(uint64(choices) // count)
        k = base
        if num_listed:
            k, position = _parameter(words, position, end, base)
            if k > uint64(MOST_PARAMETER):
                return False
        parameters[mode] = k
        low, following = (uint64(1) << k) - uint64(1), uint64(0)
        copied, done = first_before, filled  # of the set before, up to `copied`, and of this one, up to `done`
        for _ in range(num_listed):
            one = _next_one(words, position, end)
            if one >= end or one - position > uint64(choices) >> k:
                return False
            chosen = following + ((one - position) << k) + (fetch(words, one + uint64(1), last) & low)
            if chosen >= uint64(choices):
                return False
            following = chosen + uint64(1)
            position = one + uint64(1) + k
            is_new = True
            if changes:
                while copied < first_before + before and uint64(ids[copied]) < chosen:
                    if done == filled + count:
                        return False
                    ids[done] = ids[copied]
                    copied += uint64(1)
                    done += uint64(1)
                if copied < first_before + before and uint64(ids[copied]) == chosen:
                    copied += uint64(1)
                    is_new = False
            if is_new:
                if done == filled + count:
                    return False
                ids[done] = chosen
                done += uint64(1)
        if changes:
            while copied < first_before + before:
                if done == filled + count:
                    return False
                ids[done] = ids[copied]
                copied += uint64(1)
                done += uint64(1)
        if done != filled + count:
            return False
        first_before, before, filled = filled, count, filled + count
    if position > end or filled != uint64(len(ids)) or words[len(words) - 1] != uint64(0):
        return False
    return _next_one(words, position, end) == end and len(words) == (position + uint64(63)) // uint64(64) + uint64(1)
