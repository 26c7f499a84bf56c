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
MAX_BOOKS = 16
DIRECT_EXPERTS = 256
DIRECT_GAPS = 64
KEPT_BITS = 4


def symbol_table(num_experts: int, top_k: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First gap and number of extra bits of every symbol: int64 [Y] each."""
    num_gaps = num_experts - top_k + 1
    if num_experts <= DIRECT_EXPERTS:
        return np.arange(num_gaps), np.zeros(num_gaps, np.int64)
    first, extra = list(range(min(num_gaps, DIRECT_GAPS))), [0] * min(num_gaps, DIRECT_GAPS)
    gap = DIRECT_GAPS
    while gap < num_gaps:
        width = gap.bit_length() - KEPT_BITS
        first.append(gap)
        extra.append(width)
        gap += 1 << width
    return np.array(first), np.array(extra)


def book_of_slot(top_k: int) -> NDArray[np.int64]:
    """int64 [K], which of the min(K, 16) code books codes the gap before each pick."""
    books = min(top_k, MAX_BOOKS)
    return np.arange(top_k) * books // top_k


def fit_lengths(counts: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Code lengths from 1 to 11 of least total size, by package-merge; every symbol gets a code.

    Args:
        counts: int64 [Y], how often each symbol was seen, Y from 1 to 256.
    """
    if len(counts) == 1:
        return np.ones(1, np.uint8)
    leaves = sorted((int(count) + 1, (symbol,)) for symbol, count in enumerate(counts))
    packages: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(MAX_LENGTH):
        merged = sorted(leaves + packages, key=lambda package: package[0])
        pairs = zip(merged[::2], merged[1::2], strict=False)
        packages = [(a + b, left + right) for (a, left), (b, right) in pairs]
    lengths = np.zeros(len(counts), np.uint8)
    for _, symbols in packages[: len(counts) - 1]:
        np.add.at(lengths, list(symbols), 1)
    return lengths


def canonical_codes(lengths: NDArray[np.uint8]) -> NDArray[np.int64]:
    """int64 [Y], the canonical code of each symbol, its first bit in bit 0.

    Codes are given in order of (length, symbol), counting up, as in DEFLATE.

    Raises:
        TraceContentError: when the lengths are not 1 to 11 or do not fill the code space exactly.
    """
    if len(lengths) == 1 and lengths[0] == 1:
        return np.zeros(1, np.int64)
    outside = lengths.min() < 1 or lengths.max() > MAX_LENGTH
    if outside or np.sum(1 << (MAX_LENGTH - lengths.astype(np.int64))) != 1 << MAX_LENGTH:
        raise TraceContentError("a code book is not a complete prefix code of 1 to 11 bits")
    codes = np.zeros(len(lengths), np.int64)
    code = length = 0
    for symbol in np.lexsort((np.arange(len(lengths)), lengths)):
        code <<= int(lengths[symbol]) - length
        length = int(lengths[symbol])
        codes[symbol] = int(f"{code:0{length}b}"[::-1], 2)
        code += 1
    return codes


def encoding_table(lengths_BY: NDArray[np.uint8], num_experts: int, top_k: int) -> NDArray[np.uint32]:
    """uint32 [books, gaps]: all bits of a gap, extra bits included, shifted left by 5, plus how many they are."""
    first, extra = symbol_table(num_experts, top_k)
    num_gaps = num_experts - top_k + 1
    symbol = np.searchsorted(first, np.arange(num_gaps), side="right") - 1
    rest = np.arange(num_gaps) - first[symbol]
    table = np.zeros((len(lengths_BY), num_gaps), np.uint32)
    for book, lengths in enumerate(lengths_BY):
        codes, used = canonical_codes(lengths)[symbol], lengths.astype(np.int64)[symbol]
        table[book] = (codes | rest << used) << 5 | (used + extra[symbol])
    return table


def decoding_tables(
    lengths_BY: NDArray[np.uint8], num_experts: int, top_k: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
    """Tables over the next 11 bits of a stream, [books, 2048] flattened.

    Returns:
        short: uint16, gap << 8 | bits, for models without extra bits.
        full: uint32, first gap << 16 | extra bits << 8 | bits of the code.
    """
    first, extra = symbol_table(num_experts, top_k)
    full = np.zeros((len(lengths_BY), 1 << MAX_LENGTH), np.uint32)
    for book, lengths in enumerate(lengths_BY):
        codes = canonical_codes(lengths)
        for symbol, length in enumerate(lengths.tolist()):
            step = 1 << length if len(lengths) > 1 else 1
            full[book, codes[symbol] :: step] = first[symbol] << 16 | extra[symbol] << 8 | length
    short: NDArray[Any] = (full >> 16 << 8 | full & 255).astype(np.uint16)
    return short.reshape(-1), full.reshape(-1)
