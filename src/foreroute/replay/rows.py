"""The routes that one forward pass replays, on the device that runs it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import BatchMismatchError
from foreroute.trace import RoutingTrace


@dataclass(frozen=True)
class ReplayRows:
    """Expert ids for every slot of a flattened batch.

    Attributes:
        ids_LRK: uint8 or uint16 [L, R, K]; arbitrary where a slot has no route.
        unrouted_Q: int64 [Q], the slots without a route, or None when there is none.
    """

    ids_LRK: Tensor
    unrouted_Q: Tensor | None

    @classmethod
    def gather(cls, trace: RoutingTrace, row_of_slot: NDArray[np.int64], device: torch.device) -> ReplayRows:
        """Fetch the routes of each slot and move them to the device, once for all layers.

        Padding and the trailing tokens of a sequence that no router saw in the rollout stay unrouted: the model routes
        them itself. A gap before a routed row is refused, because later rows depend on it.

        Args:
            trace: where the rows are.
            row_of_slot: int64 [R], packed row of each slot; -1 for padding.
            device: where the model runs.

        Raises:
            BatchMismatchError: when a row in the middle of a sequence is absent.
        """
        _refuse_gaps(trace)
        is_routed = (row_of_slot >= 0) & trace.valid_N[row_of_slot] if trace.num_rows else row_of_slot >= 0
        ids_LRK = np.ascontiguousarray(trace.expert_ids_NLK[row_of_slot].transpose(1, 0, 2))
        unrouted = np.flatnonzero(~is_routed)
        return cls(
            torch.from_numpy(ids_LRK).to(device),
            torch.from_numpy(unrouted).to(device) if len(unrouted) else None,
        )

    @property
    def num_slots(self) -> int:
        """R, the slots of the flattened batch."""
        return self.ids_LRK.shape[1]


def _refuse_gaps(trace: RoutingTrace) -> None:
    absent_before_routed = ~trace.valid_N[:-1] & trace.valid_N[1:]
    same_sequence = np.ones(len(absent_before_routed), bool)
    same_sequence[trace.offsets[1:-1][(trace.offsets[1:-1] > 0) & (trace.offsets[1:-1] < trace.num_rows)] - 1] = False
    gaps = np.flatnonzero(absent_before_routed & same_sequence)
    if len(gaps):
        sequence = int(np.searchsorted(trace.offsets, gaps[0], side="right") - 1)
        raise BatchMismatchError(
            f"sequence {sequence} has no route at position {int(gaps[0] - trace.offsets[sequence])} but has one after "
            f"it ({len(gaps)} such gaps). Record the missing rows, or leave the sequence out"
        )
