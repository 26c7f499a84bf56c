"""The `raw` and `packed` codecs: a fixed number of bits per pick, pick order kept, any row found by arithmetic.

Payload of one layer of one block of R rows: the K ids of row 0, of row 1, ... as `bits` bits each, the lowest bit
first, in 64-bit words; then one zero word. `raw` takes 8 bits per pick up to 256 experts, else 16; `packed` takes
ceil(log2 E), at least 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import TraceContentError
from foreroute.trace.spec import RoutingSpec

MOST_UNROLLED = 16
"""Up to so many picks, kernels are compiled anew for each number of them. Chosen by hand: the presets of `costs`
pick 10 at most, and unrolled code grows with the number."""


def unrolled(values: NDArray[np.int64]) -> tuple[int, ...] | NDArray[np.int64]:
    """Return one value per pick: a tuple for up to 16 picks, else the array.

    The length of a tuple is part of its type, so that a kernel's `for k in range(len(values))` is compiled with a known
    length and unrolls.

    Args:
        values: int64 [K].
    """
    return tuple(values.tolist()) if len(values) <= MOST_UNROLLED else values


class FixedWidth(ABC):
    """Encoder and decoder of a fixed number of bits per pick for one model.

    Attributes:
        tables: empty.
    """

    keeps_order = True

    def __init__(self, spec: RoutingSpec, tables: Mapping[str, NDArray[Any]] = MappingProxyType({})) -> None:
        self.tables: dict[str, NDArray[Any]] = {}
        self._spec = spec
        self._bits = self._bits_of(spec)
        self._picks = unrolled(np.arange(spec.top_k))

    @classmethod
    def fitted(cls, spec: RoutingSpec, expert_ids_NLK: NDArray[Any], blocks: Sequence[NDArray[np.int64]]) -> Self:
        """Make the codec, which is the same for all routes. Arguments as in `Codec.fitted`."""
        return cls(spec)

    def encode(
        self, expert_ids_NLK: NDArray[Any], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the payloads of all layers, and the words of each. Arguments as in `Codec.encode`."""
        from foreroute.trace.kernels import pack_rows

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
        out_layers: NDArray[np.int64],
        out_NLK: NDArray[Any],
    ) -> None:
        """Put the wanted layers of a block into `out_NLK`. Arguments as in `Codec.decode`.

        Raises:
            TraceContentError: when a payload has another size, a row has an id of E or more or an expert twice, or bits
                follow the last row.
        """
        from foreroute.trace.kernels import unpack_rows

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
            out_layers,
            self._picks,
            out_NLK.reshape(-1),
            out_NLK.shape[1],
            np.zeros(1 << self._bits, np.int64),
        )
        if not sound:
            raise TraceContentError(
                f"a row of a block holds an id of {spec.num_experts} or more, or an expert twice, or bits follow the "
                "last row"
            )

    def _words(self, rows: int) -> int:
        # The zero word at the end is what `fetch` may read past the last pick, so that it needs no test for the end.
        return -(-rows * self._spec.top_k * self._bits // 64) + 1

    @staticmethod
    @abstractmethod
    def _bits_of(spec: RoutingSpec) -> int:
        """Of a pick."""


class Raw(FixedWidth):
    """Whole bytes: the fastest, and what other tools read most easily."""

    @staticmethod
    def _bits_of(spec: RoutingSpec) -> int:
        return 8 * spec.id_dtype.itemsize


class Packed(FixedWidth):
    """As few bits as tell E experts apart."""

    @staticmethod
    def _bits_of(spec: RoutingSpec) -> int:
        return max(1, (spec.num_experts - 1).bit_length())
