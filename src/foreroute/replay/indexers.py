"""The choices of indexers in one pass: what each is to choose for every slot of a batch, and what it chose.

They stay on the host until an indexer runs, and then go to the device one layer at a time: those of all layers take far
more memory than routes. An indexer itself runs in replay too, and slots without a choice keep what it chose.
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
    """What indexers are to choose, for every slot of a flattened batch.

    Attributes:
        spec: of the model's indexers.
        stream: choices of a trace, checked.
        row_of_slot_R: int64 [R], packed row of each slot; -1 for padding.
        places: where the slots are.
    """

    spec: IndexerSpec
    stream: DecisionStream
    row_of_slot_R: NDArray[np.int64]
    places: Places

    @cached_property
    def decided_R(self) -> NDArray[np.bool_]:
        """Bool [R], slots that have a choice."""
        decided = self.row_of_slot_R >= 0
        decided[decided] = self.stream.valid_N[self.row_of_slot_R[decided]]
        return decided

    def units_RHW(self, indexer: int) -> Tensor:
        """int64 [R, H, W] on the host, the units that the queries of each slot attend to; -1 behind the last one.

        Args:
            indexer: below D.
        """
        spec, stream = self.spec, self.stream
        visible_R = spec.num_visible(self.places.position_R)
        width = min(spec.top_k, int(visible_R.max(initial=0)))
        every_W = np.arange(width)
        units_RHW = np.where(every_W < visible_R[:, None], every_W, -1)[:, None].repeat(spec.heads, axis=1)
        starts_N = stream.offsets[indexer : -1 : stream.depth]
        chosen = np.flatnonzero(self.decided_R & (visible_R > spec.top_k))  # these have a set, and it is full
        ids = stream.ids[starts_N[self.row_of_slot_R[chosen], None] + np.arange(spec.heads * width)]
        if spec.heads > 1:  # they lie unit by unit, and are wanted head by head
            head = ids.astype(np.int64) % spec.heads
            ids = np.sort(head << 32 | ids // spec.heads, axis=1) & 0xFFFFFFFF
        units_RHW[chosen] = ids.reshape(len(chosen), spec.heads, width)
        return torch.from_numpy(units_RHW)


@dataclass(frozen=True, eq=False)
class Places:
    """Where the slots of a batch [B, T] are in their sequences.

    Attributes:
        position_R: int64 [R], of each slot in its sequence; -1 for padding.
        first_R: int64 [R], the column of the batch, cached ones counted, in which its sequence begins; 0 for padding.
    """

    position_R: NDArray[np.int64]
    first_R: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        offsets: NDArray[np.int64],
        row_of_slot_R: NDArray[np.int64],
        width: int,
        *,
        past: int = 0,
        padding_B: NDArray[np.int64] | None = None,
    ) -> Places:
        """Find them.

        Args:
            offsets: int64 [S + 1], of the sequences, whose rows are packed.
            row_of_slot_R: int64 [R], packed row of each slot; -1 for padding.
            width: T.
            past: columns in a key-value cache.
            padding_B: int64 [B], those of them that are padding; none by default.

        Raises:
            BatchMismatchError: when padding lies inside a sequence.
        """
        slots = np.flatnonzero(row_of_slot_R >= 0)
        rows = row_of_slot_R[slots]
        sequence = np.searchsorted(offsets, rows, side="right") - 1
        cached = past if padding_B is None else past - padding_B[slots // width]
        position_R, first_R = np.full(len(row_of_slot_R), -1), np.zeros(len(row_of_slot_R), np.int64)
        position_R[slots] = rows - offsets[sequence] + cached
        first_R[slots] = past + slots % width - position_R[slots]
        begun_S = np.zeros(len(offsets), np.int64)
        begun_S[sequence] = first_R[slots]
        if (first_R[slots] != begun_S[sequence]).any():
            raise BatchMismatchError(
                "padding lies inside a sequence; choices of indexers are recorded and replayed where the tokens of a "
                "sequence follow each other"
            )
        return cls(position_R, first_R)


@dataclass(frozen=True, eq=False)
class IndexerPass:
    """What one indexer does in one pass.

    Attributes:
        layer: its place among all that select in the pass, routers first.
        indexer: its place among the indexers.
        rows: what to choose; None where it chooses itself.
        observed: where to put what it handed on, by `indexer`; None where nobody wants to know.
        calls_1: int32 [1], how often it ran inside a compiled graph.
    """

    layer: int
    indexer: int
    rows: IndexerRows | None
    observed: dict[int, Tensor] | None
    calls_1: Tensor


def require_choices(trace: RoutingTrace, spec: IndexerSpec | None) -> None:
    """Raise unless the indexers of this model, if any, can choose what the trace says, if it says anything.

    Raises:
        SpecMismatchError: when this model has no indexers, or in other layers.
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
