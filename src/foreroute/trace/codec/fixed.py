"""The `raw` and `packed` codecs: a fixed number of bits per pick, pick order kept, any row found by arithmetic.

Payload of one layer of one block of R rows: the K ids of row 0, of row 1, ... as `bits` bits each, the lowest bit
first, in 64-bit words; then one zero word. `raw` takes 8 bits per pick up to 256 experts, else 16; `packed` takes
ceil(log2 E), at least 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import TraceContentError
from foreroute.trace.codec.slots import as_slots
from foreroute.trace.spec import RoutingSpec


class FixedWidth:
    """Encoder and decoder of `bits` per pick for one model."""

    keeps_order = True

    def __init__(self, spec: RoutingSpec, bits: int) -> None:
        self.tables: dict[str, NDArray[Any]] = {}
        self._spec = spec
        self._bits = bits
        self._slots = as_slots(np.arange(spec.top_k))

    def encode(
        self, expert_ids_NLK: NDArray[Any], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """The payloads of all layers in turn, and the words that each takes. Arguments as in `Codec.encode`."""
        from foreroute.trace.codec.bits import pack_rows

        spec, size = self._spec, self._words(len(rows))
        words_LW = np.zeros((spec.num_layers, size), np.uint64)
        pack_rows(expert_ids_NLK.reshape(-1), spec.num_layers, spec.top_k, rows, self._bits, words_LW)
        return words_LW.reshape(-1), np.full(spec.num_layers, size, np.int64)

    def decode(
        self,
        words: NDArray[np.uint64],
        starts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        dest: NDArray[np.int64],
        columns: NDArray[np.int64],
        out_NLK: NDArray[Any],
    ) -> None:
        """Put the wanted layers of a block into `out_NLK`. Arguments as in `Codec.decode`.

        Raises:
            TraceContentError: when a payload has another size, a row has an id of E or more or an expert twice, or bits
                follow the last row.
        """
        from foreroute.trace.codec.bits import unpack_rows

        spec, size = self._spec, self._words(len(dest))
        if (sizes != size).any():
            raise TraceContentError(f"payloads of {sizes.tolist()[:4]} words for {len(dest)} rows, expected {size}")
        sound = unpack_rows(
            words,
            starts,
            size,
            dest,
            self._bits,
            spec.num_experts,
            columns,
            self._slots,
            out_NLK.reshape(-1),
            out_NLK.shape[1],
        )
        if not sound:
            raise TraceContentError(
                f"a row of a block holds an id of {spec.num_experts} or more, or an expert twice, or bits follow the "
                "last row"
            )

    def _words(self, rows: int) -> int:
        return -(-rows * self._spec.top_k * self._bits // 64) + 1


def raw(spec: RoutingSpec) -> FixedWidth:
    """Whole bytes: the fastest, and what other tools read most easily."""
    return FixedWidth(spec, 8 * spec.id_dtype.itemsize)


def packed(spec: RoutingSpec) -> FixedWidth:
    """As few bits as tell E experts apart."""
    return FixedWidth(spec, max(1, (spec.num_experts - 1).bit_length()))
