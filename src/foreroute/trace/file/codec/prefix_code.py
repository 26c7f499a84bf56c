"""Prefix codes of at most 11 bits for the gaps between picks: lengths, canonical codes, tables. Not the bit streams.

A gap is coded as a symbol and extra bits. Models of up to 256 experts have one symbol per gap and no extra bits. Wider
models have a symbol for each gap below 64; above, a symbol per leading 4 bits, the rest being extra bits, as DEFLATE
does for distances.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import TraceContentError

MAX_LENGTH = 11
"""Bits of a code. A table over the next 11 bits decodes it with one look-up; it has 2,048 entries, 4 KiB of uint16, so
that those of 8 books just fit a first-level cache of 32 KiB."""
MAX_BOOKS = 16
"""Code books of a file. Up to so many picks, each has its own; beyond, neighbours share one. The format fixes it."""
DIRECT_EXPERTS = 256
"""Up to so many experts, every gap is a symbol of its own: it fits a byte, and there are no extra bits."""
DIRECT_GAPS = 64
"""In wider models, gaps below this are a symbol each. Chosen by hand; the format fixes it."""
KEPT_BITS = 4
"""Of the gaps from 64 on, the leading 4 bits are the symbol. The alphabet of 65,536 experts is then 144 symbols."""


def symbol_table(num_experts: int, top_k: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first gap and the number of extra bits of every symbol: int64 [Y] each."""
    num_gaps = num_experts - top_k + 1
    if num_experts <= DIRECT_EXPERTS:
        return np.arange(num_gaps), np.zeros(num_gaps, np.int64)
    first, extra = list(range(min(num_gaps, DIRECT_GAPS))), [0] * min(num_gaps, DIRECT_GAPS)
    gap = DIRECT_GAPS
    # `gap` is the first of its symbol, which spans the gaps that agree in their leading 4 bits, the first of them a 1:
    # 8 symbols from each power of two to the next.
    while gap < num_gaps:
        width = gap.bit_length() - KEPT_BITS
        first.append(gap)
        extra.append(width)
        gap += 1 << width
    return np.array(first), np.array(extra)


def book_of_pick(top_k: int) -> NDArray[np.int64]:
    """Return which of the min(K, 16) code books codes the gap before each pick: int64 [K]."""
    books = min(top_k, MAX_BOOKS)
    return np.arange(top_k) * books // top_k


def fit_lengths(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Find the code lengths from 1 to 11 of least total size, by package-merge; every symbol gets a code.

    Args:
        counts: int64 [Y], how often each symbol was seen, Y from 1 to 256.
    """
    if len(counts) == 1:
        return np.ones(1, np.uint8)
    # Package-merge (Larmore and Hirschberg, 1990). A symbol has one leaf for each length that its code may have. Each
    # round takes the leaves and the packages of the round before, cheapest first, and joins neighbours in pairs.
    # members[p, y] is how many leaves of symbol y are in package p. Of the last round, the cheapest Y - 1 packages hold
    # as many leaves of a symbol as its code has bits. Counts are one higher, so that every symbol gets a code.
    leaf_weights, leaf_members = counts + 1, np.eye(len(counts), dtype=np.uint8)
    weights, members = leaf_weights[:0], leaf_members[:0]
    for _ in range(MAX_LENGTH):
        all_weights = np.concatenate([leaf_weights, weights])
        order = np.argsort(all_weights, kind="stable")[: len(all_weights) // 2 * 2]
        weights = all_weights[order].reshape(-1, 2).sum(axis=1)
        members = (
            np.concatenate([leaf_members, members])[order].reshape(len(weights), 2, -1).sum(axis=1, dtype=np.uint8)
        )
    lengths: NDArray[np.uint8] = members[: len(counts) - 1].sum(axis=0, dtype=np.uint8)
    return lengths


def encoding_table(lengths_BY: NDArray[np.uint8], num_experts: int, top_k: int) -> NDArray[np.uint32]:
    """Return all bits of each gap, extra ones included, shifted left by 5, plus their number: uint32 [books, gaps]."""
    first, extra = symbol_table(num_experts, top_k)
    gaps = np.arange(num_experts - top_k + 1)
    symbol = np.searchsorted(first, gaps, side="right") - 1
    rest = gaps - first[symbol]
    table = np.zeros((len(lengths_BY), len(gaps)), np.uint32)
    # Canonical codes: in order of (length, symbol), each begins where the one before ends, counted in 11-bit words.
    for book, lengths in enumerate(lengths_BY):
        order, widths = _code_space(lengths)
        codes = np.zeros(len(lengths), np.int64)
        codes[order] = _REVERSED[np.cumsum(widths) - widths]
        used = lengths.astype(np.int64)[symbol]
        table[book] = (codes[symbol] | rest << used) << 5 | (used + extra[symbol])
    return table


def decoding_tables(
    lengths_BY: NDArray[np.uint8], num_experts: int, top_k: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    """Make tables over the next 11 bits of a stream, [books, 2048] flattened.

    Returns:
        short: uint16, gap << 8 | bits, for models without extra bits.
        full: uint32, first gap << 16 | extra bits << 8 | bits of the code.
    """
    first, extra = symbol_table(num_experts, top_k)
    full = np.zeros((len(lengths_BY), 1 << MAX_LENGTH), np.uint32)
    for book, lengths in enumerate(lengths_BY):
        order, widths = _code_space(lengths)
        entries = first << 16 | extra << 8 | lengths
        # A code stands for all words that begin with it. A stream holds them reversed, its first bit lowest.
        full[book] = np.repeat(entries[order], widths)[_REVERSED]
    short: NDArray[Any] = (full >> 16 << 8 | full & 255).astype(np.uint16)
    return short.reshape(-1), full.reshape(-1)


def check_lengths(lengths_BY: NDArray[np.uint8]) -> None:
    """Raise `TraceContentError` unless each book has lengths of 1 to 11 that fill the code space exactly."""
    # A code of n bits takes 2^(11-n) of the 2^11 words of 11 bits. Together they take all of them, or else some words
    # would decode to nothing: a decoder could not be without a test.
    if lengths_BY.shape[1] == 1:
        complete = lengths_BY == 1
    else:
        spans = np.where((lengths_BY >= 1) & (lengths_BY <= MAX_LENGTH), 1 << MAX_LENGTH >> lengths_BY.astype(int), 0)
        complete = (spans > 0).all(axis=1) & (spans.sum(axis=1) == 1 << MAX_LENGTH)
    if not complete.all():
        raise TraceContentError("a code book is not a complete prefix code of 1 to 11 bits")


def _code_space(lengths: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort symbols by their codes, so by (length, symbol) as in DEFLATE, and count the 11-bit words of each."""
    order = np.lexsort((np.arange(len(lengths)), lengths))
    if len(lengths) == 1:
        return order, np.array([1 << MAX_LENGTH])
    return order, 1 << (MAX_LENGTH - lengths[order].astype(np.int64))


_REVERSED = np.array([int(f"{word:0{MAX_LENGTH}b}"[::-1], 2) for word in range(1 << MAX_LENGTH)])
"""11-bit words with their bits turned round: codes are counted up from their first bit, which a stream puts lowest."""
