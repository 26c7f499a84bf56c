"""The choices of indexers in one pass: what each is to choose for every row of a batch, and what it chose.

They stay on the host until an indexer runs, and then go to the device one layer at a time: those of all layers take far
more memory than routes. An indexer itself runs in replay too, and rows without a choice keep what it chose.

Letters: R rows of a batch [B, T], padding included, N packed rows, H heads, W units, D indexers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import BatchMismatchError, SpecMismatchError
from foreroute.trace import RoutingTrace
from foreroute.trace.indexers import INDEXER, IndexerSpec
from foreroute.trace.streams import DecisionStream


@dataclass(frozen=True, eq=False)
class IndexerRows:
    """What indexers are to choose, for every row of a flattened batch."""

    spec: IndexerSpec
    stream: DecisionStream  # choices of a trace, checked
    row_R: NDArray[np.int64]  # packed row of each; -1 for padding
    position_R: NDArray[np.int64]  # as `find_positions`
    first_R: NDArray[np.int64]  # as there

    @cached_property
    def decided_R(self) -> NDArray[np.bool_]:
        """Bool [R], rows that have a choice."""
        decided_R = self.row_R >= 0
        decided_R[decided_R] = self.stream.valid_N[self.row_R[decided_R]]
        return decided_R

    def units_RHW(self, indexer: int) -> Tensor:
        """List the units that the queries of each row attend to, int64 [R, H, W] on the host, -1 behind the last."""
        spec, stream = self.spec, self.stream
        visible_R = spec.num_visible(self.position_R)
        width = min(spec.top_k, int(visible_R.max(initial=0)))
        every_W = np.arange(width)
        units_RHW = np.where(every_W < visible_R[:, None], every_W, -1)[:, None].repeat(spec.heads, axis=1)
        starts_N = stream.offsets[indexer : -1 : stream.depth]
        chosen = np.flatnonzero(self.decided_R & (visible_R > spec.top_k))  # these have a set, and it is full
        ids = stream.ids[starts_N[self.row_R[chosen], None] + np.arange(spec.heads * width)]
        if spec.heads > 1:
            # An id is unit * heads + head, so that sets ascend unit by unit. Head by head is wanted: one sort of 64-bit
            # keys, the head above and the unit below, both of which fit 32 bits, keeps the units of a head ascending.
            head = ids.astype(np.int64) % spec.heads
            ids = np.sort(head << 32 | ids // spec.heads, axis=1) & 0xFFFFFFFF
        units_RHW[chosen] = ids.reshape(len(chosen), spec.heads, width)
        return torch.from_numpy(units_RHW)


def find_positions(
    offsets: NDArray[np.int64],
    row_R: NDArray[np.int64],
    width: int,
    *,
    past: int = 0,
    padding_B: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find where the rows of a batch [B, T = `width`] are in sequences of these offsets, int64 [S + 1].

    `padding_B`, int64 [B], counts the padding among `past` columns of a key-value cache. Returned are int64 [R] twice:
    the position of a row in its sequence, -1 for padding; and the column, cached ones counted, where that begins, or 0.

    Raises:
        BatchMismatchError: when padding lies inside a sequence.
    """
    at = np.flatnonzero(row_R >= 0)
    sequence = np.searchsorted(offsets, row_R[at], side="right") - 1
    cached = past if padding_B is None else past - padding_B[at // width]
    position_R, first_R = np.full(len(row_R), -1), np.zeros(len(row_R), np.int64)
    position_R[at] = row_R[at] - offsets[sequence] + cached
    first_R[at] = past + at % width - position_R[at]
    begun_S = np.zeros(len(offsets), np.int64)
    begun_S[sequence] = first_R[at]
    if (first_R[at] != begun_S[sequence]).any():
        raise BatchMismatchError(
            "padding lies inside a sequence; choices of indexers are recorded and replayed where the tokens of a "
            "sequence follow each other"
        )
    return position_R, first_R


@dataclass(frozen=True, eq=False)
class IndexerPass:
    """What one indexer does in one pass."""

    layer: int  # its number among all that select in the pass, routers first
    indexer: int  # its number among the indexers
    rows: IndexerRows | None  # what to choose; None where it chooses itself
    observed: dict[int, Tensor] | None  # where to put what it handed on; None where nobody wants to know
    calls_1: Tensor  # int32 [1], how often it ran inside a compiled graph


def require_choices(trace: RoutingTrace, spec: IndexerSpec | None) -> None:
    """Raise unless the indexers of a model, if any, can choose what the trace says, if it says anything.

    Raises:
        SpecMismatchError: when the model has no indexers, or in other layers.
        TraceContentError: when the choices cannot be those of its indexers.
    """
    stream = trace.streams.get(INDEXER)
    if stream is None:
        return
    if spec is None:
        raise SpecMismatchError(
            "the trace has choices of sparse-attention indexers, and this model has no indexer that can be replayed. "
            f'Take them off with trace.without_streams("{INDEXER}") to replay the routes alone'
        )
    spec.check(stream, trace.offsets)
