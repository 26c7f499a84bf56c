"""How the picks of a block of rows become 64-bit words and back. Where the words go is the business of `trace.file`.

    raw       whole bytes, order kept
    packed    ceil(log2 E) bits per pick, order kept, any row found by arithmetic
    planes    order dropped, renumbered by popularity, prefix codes: the densest

Compiled kernels are imported when the first block is encoded or decoded, so that importing foreroute stays light.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Self, get_args

import numpy as np
from numpy.typing import NDArray

from foreroute.trace.file.codec.fixed import Packed, Raw
from foreroute.trace.file.codec.planes import Planes
from foreroute.trace.spec import RoutingSpec

CodecName = Literal["raw", "packed", "planes"]
"""How the routes of a trace file are coded."""

CODECS: tuple[CodecName, ...] = get_args(CodecName)
"""The names of all codecs."""


class Codec(Protocol):
    """An encoder and decoder for one model. It reuses buffers: one thread at a time.

    Attributes:
        tables: small arrays that a decoder needs, kept once per file.
    """

    tables: dict[str, NDArray[Any]]

    def __init__(self, spec: RoutingSpec, tables: Mapping[str, NDArray[Any]]) -> None:
        """Take the tables of a file.

        Raises:
            TraceContentError: when they are missing or wrong.
        """

    @classmethod
    def fitted(cls, spec: RoutingSpec, expert_ids_NLK: NDArray[Any], blocks: Sequence[NDArray[np.int64]]) -> Self:
        """Make a codec with tables that suit the routes.

        Args:
            spec: the model.
            expert_ids_NLK: C-contiguous routes, checked by `first_bad_picks`.
            blocks: int64 [R] each, the rows of every block that will be encoded.
        """

    @property
    def keeps_order(self) -> bool:
        """Whether picks come back in the order in which they went in; else they come back ascending."""

    def encode(
        self, expert_ids_NLK: NDArray[Any], rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the payloads of all layers in turn, and the words that each takes: uint64 [Z], int64 [L].

        Args:
            expert_ids_NLK: C-contiguous routes, checked by `first_bad_picks`.
            rows: int64 [R], the rows of the block, at least one.
        """

    def decode(
        self,
        words: NDArray[np.uint64],
        starts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        dest: NDArray[np.int64],
        out_layers: NDArray[np.int64],
        out_NLK: NDArray[Any],
    ) -> None:
        """Put wanted layers of a block into place, safely whatever the words are.

        Args:
            words: uint64 [Z].
            starts: int64 [C], where the payload of each wanted layer begins in `words`.
            sizes: int64 [C], words per payload; `starts + sizes` are within `words`.
            dest: int64 [R], the output row of each row of the block, or -1 where it is not wanted; at least one row.
            out_layers: int64 [C], the output layer of each wanted layer.
            out_NLK: uint8 or uint16 [N, L', K], C-contiguous, written.

        Raises:
            TraceContentError: when the words cannot be what `encode` wrote.
        """


CODEC_CLASSES: Mapping[str, type[Codec]] = {"raw": Raw, "packed": Packed, "planes": Planes}
"""The codec of each name."""
