"""Gradients of replicas on their way home. They travel from peer to peer, whatever way the weights came."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.transfers import Transfer, row_messages
from foreroute.plan.schedule import CellSchedule


class GradientReturn:
    """Gradients of the replicas of a cell, sent when it is made: a collective call, which does not wait."""

    def __init__(
        self,
        peers: PeerGroup,
        moves: CellSchedule,  # in the expert-parallel group of this rank
        grads: Mapping[str, Tensor],  # name -> [V here, ...] in order of slot, not written to until `wait` returns
        what: str,
        *,
        first: int,  # the number among the peers of the first rank of the group
        record: Callable[[int, float], None],  # called with bytes that arrived, and seconds that the host waited
    ) -> None:
        begun = time.monotonic()
        self._arrived = {name: grad.new_empty((len(moves.sends), *grad.shape[1:])) for name, grad in grads.items()}
        # what comes home is in order of the row of the shard, those of one row behind each other
        rows, replicas_of_row = np.unique(moves.sends["row"], return_counts=True)
        self._rows, self._replicas_of_row = rows.tolist(), replicas_of_row.tolist()
        sends, receives = (
            row_messages(of_end, "position", {name: each.unbind() for name, each in rows_of.items()}, first)
            for of_end, rows_of in ((moves.hosted, grads), (moves.sends, self._arrived))
        )
        self._transfer = Transfer(peers, what, sends, receives).post()
        self._record = record
        self._exposed_s = time.monotonic() - begun

    def wait(self) -> dict[str, dict[int, Tensor]]:
        """Wait for what comes home: name -> row of this rank's shard -> the gradient to be added there."""
        # those of an expert are added in ascending order of their rank; all ranks wait for the same ones in one order
        begun = time.monotonic()
        self._transfer.wait()
        sums = add_neighbours(self._arrived, self._replicas_of_row)
        self._record(self._transfer.direct_bytes, self._exposed_s + time.monotonic() - begun)
        return {name: dict(zip(self._rows, of_rows, strict=True)) for name, of_rows in sums.items()}


def add_neighbours(tensors: Mapping[str, Tensor], lengths_S: Sequence[int]) -> dict[str, list[Tensor]]:
    """Add up neighbouring rows of each of [V, ...], those of a segment one after the other, on any device alike.

    Gives S sums by name, in float32, or float64 for rows in float64. Rows of these dtypes are written to.
    """
    rows = {name: each.to(wide_dtype(each.dtype)).unbind() for name, each in tensors.items()}
    ends = accumulate(lengths_S, initial=0)
    firsts = list(zip(ends, lengths_S, strict=False))
    # the n-th row of every segment that has one, of all tensors at once
    for n in range(1, max(lengths_S, default=0)):
        longer = [first for first, length in firsts if length > n]
        torch._foreach_add_(
            [of_name[first] for of_name in rows.values() for first in longer],
            [of_name[first + n] for of_name in rows.values() for first in longer],
        )
    return {name: [of_name[first] for first, _ in firsts] for name, of_name in rows.items()}


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype of gradients of replicas: float32, or float64 for weights in float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
