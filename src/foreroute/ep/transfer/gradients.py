"""Gradients of replicas on their way home. They travel from peer to peer, whatever way the weights came."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.transfers import Transfer, row_messages
from foreroute.plan.schedule import CellSchedule
from foreroute.replay.rows import joined_to_device


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
        rows, self._replicas_of_row = np.unique(moves.sends["row"], return_counts=True)
        self._rows = rows.tolist()
        sends = row_messages(moves.hosted, "position", grads, first)
        self._transfer = Transfer(
            peers, what, sends, row_messages(moves.sends, "position", self._arrived, first)
        ).post()
        self._record = record
        self._exposed_s = time.monotonic() - begun

    def wait(self) -> dict[str, dict[int, Tensor]]:
        """Wait for what comes home: name -> row of this rank's shard -> the gradient to be added there."""
        # Rows of experts that have replicas elsewhere alone. Those of an expert are added in ascending order of their
        # rank, in a wide dtype. All ranks wait for the same ones in the same order.
        begun = time.monotonic()
        self._transfer.wait()
        sums = {
            name: dict(zip(self._rows, segment_sums(grad, self._replicas_of_row), strict=True))
            for name, grad in self._arrived.items()
        }
        self._record(self._transfer.direct_bytes, self._exposed_s + time.monotonic() - begun)
        return sums


def segment_sums(rows: Tensor, lengths_S: Sequence[int] | np.ndarray) -> Tensor:
    """Add up neighbouring rows of [V, ...], those of a segment one after the other, on any device alike.

    Gives [S, ...] in float32, or float64 for rows in float64; zeros for an empty segment.
    """
    wide = rows.to(wide_dtype(rows.dtype))
    if not len(lengths_S):
        # of which torch cannot take the smallest
        return wide
    lengths = joined_to_device([np.asarray(lengths_S, np.int64)], rows.device)
    # on a device, checking the lengths would wait for it
    unchecked = rows.device.type != "cpu"
    return torch.segment_reduce(wide, "sum", lengths=lengths, axis=0, unsafe=unchecked, initial=0.0)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype of gradients of replicas: float32, or float64 for weights in float64."""
    return torch.promote_types(dtype, torch.float32)
