"""The routes that one forward pass replays, on the device that runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.replay.missing import MissingRows, is_faithful, is_routed, refuse_missing
from foreroute.trace import RoutingTrace
from foreroute.trace.container import weights_of


@dataclass(frozen=True)
class ReplayRows:
    """Expert ids for every slot of a flattened batch.

    Attributes:
        ids_LRK: uint8 or uint16 [L, R, K]; arbitrary where a slot has no route.
        routed_R: bool [R], slots that have a route.
        unrouted_Q: int64 [Q], the slots that have none, or None where all have one.
        real_R: bool [R], False for padding.
        counted_R: bool [R], tokens that belong in the loss under the policy for missing rows; False for padding.
        ask_all: whether routers are to select by themselves in every slot, beside what is forced on them.
        weights_LRK: float32 [L, R, K], gate weights to force where a slot has a route; None leaves them live.
    """

    ids_LRK: Tensor
    routed_R: Tensor
    unrouted_Q: Tensor | None
    real_R: Tensor
    counted_R: Tensor
    ask_all: bool = False
    weights_LRK: Tensor | None = None

    @classmethod
    def gather(
        cls,
        trace: RoutingTrace,
        row_of_slot: NDArray[np.int64],
        device: torch.device,
        missing: MissingRows = "error",
        *,
        weights: bool = False,
    ) -> ReplayRows:
        """Fetch the routes of each slot and move them to the device, once for all layers.

        Padding and the last token of a sequence, which no router saw in the rollout, stay unrouted: the model routes
        them itself. Other rows without a route follow the policy.

        Args:
            trace: where the rows are.
            row_of_slot: int64 [R], packed row of each slot; -1 for padding.
            device: where the model runs.
            missing: the policy.
            weights: whether to fetch gate weights too, which the trace must have.

        Raises:
            BatchMismatchError: under "error", when a row is missing that later tokens depend on.
        """
        if missing == "error":
            refuse_missing(trace, row_of_slot)
        routed = is_routed(trace, row_of_slot)
        counted = is_faithful(trace, row_of_slot) if missing == "drop" else row_of_slot >= 0
        ids_LRK = np.ascontiguousarray(trace.expert_ids_NLK[row_of_slot].transpose(1, 0, 2))
        rows = cls.from_host(_pinned(ids_LRK, device), routed, row_of_slot >= 0, counted, device)
        if not weights:
            return rows
        weights_LRK = np.ascontiguousarray(weights_of(trace)[row_of_slot].transpose(1, 0, 2))
        return replace(rows, weights_LRK=to_device(weights_LRK, device))

    @classmethod
    def from_host(
        cls,
        ids_LRK: Tensor,
        routed_R: NDArray[np.bool_],
        real_R: NDArray[np.bool_],
        counted_R: NDArray[np.bool_],
        device: torch.device,
    ) -> ReplayRows:
        """Move what is known on the host, attributes as above, to the device, ids from pinned memory where it is a GPU.

        The device is not waited for.
        """
        unrouted = np.flatnonzero(~routed_R)
        return cls(
            ids_LRK.to(device, non_blocking=True),
            to_device(routed_R, device),
            to_device(unrouted, device) if len(unrouted) else None,
            to_device(real_R, device),
            to_device(counted_R, device),
        )

    def asking_all(self) -> ReplayRows:
        """The same, with routers to select by themselves in every slot."""
        return replace(self, ask_all=True)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array of the host on a device, which is not waited for; on the CPU the array itself."""
    return _pinned(array, device).to(device, non_blocking=True)


def _pinned(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy from other memory would wait for what was launched before it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
