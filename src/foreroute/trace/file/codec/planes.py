"""The `planes` codec: the densest. Pick order is dropped; ids come back ascending.

Within a block the experts of a layer are renumbered by popularity. Pick k of a row, counted from the most popular,
belongs to plane k, and is stored as its gap to pick k - 1 in the prefix code of that plane, which the whole file
shares. A set of 8 of 128 then takes about 4 bytes, below the 5.05 of an index into all sets, because popularity counts.

Payload of one layer of one block, in 64-bit words:

    2 words             four uint32: the bit at which each lane ends, counted from the start of the stream
    ceil(E·w / 8)       the expert of each rank, w = 1 or 2 bytes each; only when R·K >= 16·E, else rank = id
    ceil(bits / 64)     the stream: lane 0, 1, 2, 3; a lane holds R // 4 rows, the last one the rest as well
    1 word              zero
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import TraceContentError
from foreroute.trace.file.codec.fixed import unrolled
from foreroute.trace.file.codec.prefix_code import (
    DIRECT_EXPERTS,
    book_of_pick,
    check_lengths,
    decoding_tables,
    encoding_table,
    fit_lengths,
    symbol_table,
)
from foreroute.trace.spec import MAX_EXPERTS, RoutingSpec

PICKS_PER_RANKING = 16
"""Picks per expert from which on a payload has a ranking. The format fixes it. Up to 256 experts a ranking then costs
half a bit per pick; on workload G8 it saves 30 % with 16 picks per expert, and pays from 4 on."""
SAMPLED_BLOCKS = 16
"""About how many blocks code lengths are fitted to, spread over the file. On workload G8 all 162 blocks instead of 16
save 0.02 %."""
SHORT_PICKS = 10
"""With up to so many picks, the codes of a row nearly always fit in one fetch of 64 bits: on workload G8, 8 picks of
128 take 26 bits on average and 44 at most. Chosen by hand; `short_lanes` would be right for up to 16."""


class Planes:
    """Encoder and decoder for one model and one set of code books.

    Attributes:
        tables: `code_lengths`, uint8 [books, Y], which a file keeps.
    """

    keeps_order = False

    def __init__(self, spec: RoutingSpec, tables: Mapping[str, NDArray[Any]]) -> None:
        """Check the code books.

        Raises:
            TraceContentError: when they are not complete prefix codes of the right shape.
        """
        if "code_lengths" not in tables:
            raise TraceContentError("tensor code_lengths is missing")
        lengths = tables["code_lengths"]
        book = book_of_pick(spec.top_k)
        expected = (int(book.max()) + 1, len(symbol_table(spec.num_experts, spec.top_k)[0]))
        if lengths.dtype != np.uint8 or lengths.shape != expected:
            raise TraceContentError(f"code_lengths is {lengths.dtype} {lengths.shape}, expected uint8 {expected}")
        self.tables = {"code_lengths": lengths}
        self._spec = spec
        self._books = unrolled(book)
        self._short = spec.num_experts <= DIRECT_EXPERTS and spec.top_k <= SHORT_PICKS
        check_lengths(lengths)
        self._ranking = np.zeros(DIRECT_EXPERTS if spec.num_experts <= DIRECT_EXPERTS else MAX_EXPERTS, spec.id_dtype)
        self._planes: NDArray[Any] = np.zeros(0, spec.id_dtype)
        self._words = np.zeros(0, np.uint64)

    @classmethod
    def fitted(cls, spec: RoutingSpec, expert_ids_NLK: NDArray[Any], blocks: Sequence[NDArray[np.int64]]) -> Planes:
        """Fit code books to a sample of the blocks to be encoded.

        Args:
            spec: the model.
            expert_ids_NLK: C-contiguous routes, checked.
            blocks: int64 [R] each, the rows of every block.
        """
        from foreroute.trace.file.codec.planes_encode import count_gaps

        first, _ = symbol_table(spec.num_experts, spec.top_k)
        book = book_of_pick(spec.top_k)
        counts = np.zeros((int(book.max()) + 1, spec.num_experts - spec.top_k + 1), np.int64)
        even = fit_lengths(np.zeros(len(first), np.int64))
        # an encoder with any books at all, for its buffers and rankings
        blank = cls(spec, {"code_lengths": np.stack([even] * len(counts))})
        for rows in blocks[:: max(1, len(blocks) // SAMPLED_BLOCKS)]:
            if len(rows):
                blank._rank(expert_ids_NLK, rows)
                count_gaps(blank._planes, spec.num_layers, len(rows), len(rows), book, counts)
        # The gaps of one symbol lie side by side and share its code, so their counts are added up.
        return cls(spec, {"code_lengths": np.stack([fit_lengths(c) for c in np.add.reduceat(counts, first, axis=1)])})

    def encode(
        self, expert_ids_NLK: NDArray[Any], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the payloads of all layers in turn, and the words that each takes: uint64 [Z], int64 [L].

        Args:
            expert_ids_NLK: C-contiguous routes, checked.
            rows: int64 [R], the rows of the block.
        """
        from foreroute.trace.file.codec.planes_encode import write_block

        spec = self._spec
        sizes = np.zeros(spec.num_layers, np.int64)
        ranking_LE, head = self._rank(expert_ids_NLK, rows), self._head_words(len(rows))
        # as if every gap took the longest code; then the word that is not full, and the zero word at the end
        most = head + len(rows) * spec.top_k * int((self._encoding & 31).max()) // 64 + 2
        if len(self._words) < most * spec.num_layers:
            self._words = np.empty(most * spec.num_layers, np.uint64)
        used = write_block(
            self._planes, len(rows), len(rows), ranking_LE, head, self._encoding, self._books, self._words, sizes
        )
        return self._words[:used].copy(), sizes

    def decode(
        self,
        words: NDArray[np.uint64],
        starts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        dest: NDArray[np.int64],
        out_layers: NDArray[np.int64],
        out_NLK: NDArray[Any],
    ) -> None:
        """Put the wanted layers of a block into `out_NLK`, ids ascending. Arguments as in `Codec.decode`.

        Raises:
            TraceContentError: when a payload cannot be what `encode` wrote.
        """
        from foreroute.trace.file.codec.planes_decode import read_block

        spec, rows = self._spec, len(dest)
        head = self._head_words(rows)
        # A row has a bit at least, so its stream has a word; then comes the zero word. `read_block` reads both unasked.
        if sizes.min() < head + 2:
            raise TraceContentError(f"a payload of {int(sizes.min())} words cannot hold {rows} rows")
        self._reserve(rows, len(starts))
        out, num_out = out_NLK.reshape(-1), out_NLK.shape[1]
        how = (
            head,
            spec.num_experts,
            self._short,
            self._decoding,
            self._books,
            self._network,
            self._ranking,
            self._planes,
        )
        bad = read_block(words, starts, sizes, dest, out_layers, *how, out, num_out)
        if bad >= 0:
            raise TraceContentError(f"the payload of wanted layer {bad} of a block of {rows} rows does not decode")

    @cached_property
    def _network(self) -> NDArray[np.int64]:
        from foreroute.trace.file.codec.planes_encode import comparators

        return comparators(self._spec.top_k)

    @cached_property
    def _encoding(self) -> NDArray[np.uint32]:
        return encoding_table(self.tables["code_lengths"], self._spec.num_experts, self._spec.top_k)

    @cached_property
    def _decoding(self) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
        return decoding_tables(self.tables["code_lengths"], self._spec.num_experts, self._spec.top_k)

    def _rank(self, expert_ids_NLK: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
        """Fill the planes with the block's ranks, sorted per row; return the expert of each rank, [L, E]."""
        from foreroute.trace.file.codec.planes_encode import rank_experts, sorted_ranks

        spec = self._spec
        self._reserve(len(rows), spec.num_layers)
        ranking_LE, rank_LE = np.zeros((2, spec.num_layers, spec.num_experts), spec.id_dtype)
        flat = expert_ids_NLK.reshape(-1)
        ranked = self._head_words(len(rows)) > 2
        rank_experts(flat, spec.num_layers, spec.top_k, rows, ranked, ranking_LE, rank_LE)
        sorted_ranks(flat, spec.num_layers, rows, rank_LE, self._network, self._books, self._planes, len(rows))
        return ranking_LE

    def _head_words(self, rows: int) -> int:
        """The words before the stream: the ends of the lanes, and the ranking where a payload has one."""
        spec = self._spec
        if rows * spec.top_k < PICKS_PER_RANKING * spec.num_experts:
            return 2
        return 2 + -(-spec.num_experts * spec.id_dtype.itemsize // 8)

    def _reserve(self, rows: int, num_layers: int) -> None:
        """Have planes for this many rows. They are kept from block to block, and only ever grow."""
        needed = rows * num_layers * self._spec.top_k
        if len(self._planes) < needed:
            self._planes = np.empty(needed, self._spec.id_dtype)
