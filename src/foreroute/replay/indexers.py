"""The choices of indexers in one pass: what each is to choose for every row of a batch, and what it chose.

They stay on the host until an indexer runs, and then go to the device one layer at a time, as `CodedChoices`: those of
all layers take far more memory than routes. An indexer itself runs in replay too, and rows without a choice keep what
it chose.

Letters: R rows of a batch [B, T], padding included, N packed rows, H heads, W units, D indexers.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import BatchMismatchError, SpecMismatchError
from foreroute.replay.coded_sets import CodedChoices
from foreroute.replay.rows import TraceOnDevice
from foreroute.trace import RoutingTrace
from foreroute.trace.indexers import INDEXER, IndexerSpec


class IndexerRows:
    """Choices of indexers, for every row of a flattened batch, whose device has all but the choices.

    Attributes:
        decided_R: bool [R], rows that have a choice.
        position_R: int64 [R], the position of a row in its sequence; -1 for padding.
        first_R: int64 [R], the column where that begins, or 0.
    """

    def __init__(self, choices: CodedChoices, there: TraceOnDevice, row_R: Tensor, width: int) -> None:
        none, trace = np.full(1, -1), there.trace  # which is behind the last row, where padding finds it
        self.spec, self._choices = choices.spec, choices
        self.decided_R = there.upload("has choices", choices.stream.valid_N, np.zeros(1, np.bool_))[row_R]
        self.position_R = there.upload("positions", trace.positions_N, none)[row_R]
        column_R = torch.arange(len(row_R), device=row_R.device) % width
        self.first_R = torch.where(row_R < 0, 0, column_R - self.position_R)
        self._visible_R = there.upload("visible units", choices.visible_N, none)[row_R]
        self._row_R = there.upload("rows of sets", choices.row_N, none)[row_R]
        self._start_S, self._low_S = there.upload("starts of sets", choices.start_S), there.upload("low", choices.low_S)
        most = min(int(choices.visible_N.max(initial=0)), int(self.spec.num_visible(np.array([width - 1]))[0]))
        self._every_W = torch.arange(min(self.spec.top_k, most), device=row_R.device, dtype=torch.int32)

    def units_RHW(self, indexer: int) -> Tensor:
        """List the units that the queries of each row attend to, int32 [R, H, W], -1 behind the last."""
        every_W, heads = self._every_W, self.spec.heads
        units_RW = torch.where(every_W < self._visible_R[:, None], every_W, -1)
        units_RHW = units_RW[:, None].expand(-1, heads, -1)
        if not len(self._start_S):
            return units_RHW
        units_MHK = self._choices.units_SK(indexer, self._start_S, self._low_S).view(-1, heads, self.spec.top_k)
        chosen_RHW = units_MHK[self._row_R.clamp(min=0)][..., : len(every_W)]
        return torch.where(self._row_R[:, None, None] < 0, units_RHW, chosen_RHW)


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
    Raises `BatchMismatchError` when padding lies inside a sequence.
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
    """Pass of one indexer."""

    layer: int  # its number among all that select in the pass, routers first
    indexer: int  # its number among the indexers
    rows: IndexerRows | None  # what to choose; None where it chooses itself
    observed: dict[int, Tensor] | None  # where to put what it handed on; None where nobody wants to know
    calls_1: Tensor  # int32 [1], how often it ran inside a compiled graph


def require_choices(trace: RoutingTrace, spec: IndexerSpec | None) -> None:
    """Raise unless the indexers of a model, if any, can choose what the trace says, as `IndexerSpec.check`."""
    stream = trace.streams.get(INDEXER)
    if stream is None:
        return
    if spec is None:
        raise SpecMismatchError(
            "the trace has choices of sparse-attention indexers, and this model has no indexer that can be replayed. "
            f'Take them off with trace.without_streams("{INDEXER}") to replay the routes alone'
        )
    spec.check(stream, trace.offsets)


def warn_of_choices(missing: str, advice: str) -> None:
    """Warn that routes will be replayed without the choices of the policy's indexers."""
    warnings.warn(
        f"the policy has indexers of sparse attention, and {missing}: routes alone are replayed, and queries attend to "
        f"other units than in the rollout. {advice}",
        stacklevel=3,
    )
