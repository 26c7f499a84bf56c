"""What is moved for replicas: cells and the order in which they run, weights on their way, and gradients going home.

Gradients travel from peer to peer, whatever way the weights came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreroute.ep.transfer.peers import PeerGroup, RowMoves, post
from foreroute.plan.schedule import CellSchedule

Home = Mapping[str, Tensor] | Mapping[str, Sequence[Tensor]]
"""name -> [E / G, ...] or as many tensors: the home experts of a layer on this rank, in ascending order of their id."""


class Cell(NamedTuple):
    """One routed layer in one micro-step of one step: a barrier for all ranks."""

    step: int
    micro_step: int
    layer: int

    def __str__(self) -> str:
        return f"step {self.step}, micro-step {self.micro_step}, routed layer {self.layer}"


@dataclass(frozen=True, eq=False)
class Fetch:
    """The weights of the replicas of one cell, under way.

    Attributes:
        cell: which.
        wait: gives name -> [replicas here, ...] in ascending order of slot, valid until the slots are filled again; on
            NCCL the current stream waits for them, and the host does not. Raises `TransferError` when they cannot be
            had.
    """

    cell: Cell
    wait: Callable[[], dict[str, Tensor]]


def next_cell(
    previous: Cell | None, cell: Cell, layers: Collection[int], shape: tuple[int, int], *, updating: bool
) -> Cell | None:
    """The cell that this rank runs after `cell`, as far as it is known.

    Forward goes up through neighbouring layers. In an update it turns back at the last of them: backward asks for every
    cell again, and activation checkpointing more than once, before the next micro-step begins.

    Args:
        previous: the last one that ran before `cell` and was another, of the same step; None for the first.
        cell: the cell that runs now.
        layers: routed layers that run on this rank: all of them, or those of a pipeline stage.
        shape: M micro-steps and L layers of the step.
        updating: whether backward passes follow; False in recompute.

    Returns:
        None after the last cell of the step, and where a stage is done with a micro-step: the pipeline's schedule says
        what comes then.
    """
    num_micro_steps, num_layers = shape
    is_backward = updating and previous is not None and previous.micro_step == cell.micro_step and cell < previous
    if is_backward or (updating and cell.layer + 1 not in layers):
        if cell.layer - 1 in layers:
            return cell._replace(layer=cell.layer - 1)
    elif cell.layer + 1 in layers:
        return cell._replace(layer=cell.layer + 1)
    if len(layers) < num_layers or cell.micro_step == num_micro_steps - 1:
        return None
    return Cell(cell.step, cell.micro_step + 1, 0)


def expert_bytes(home: Home) -> int:
    """Bytes of one expert's weights in a layer."""
    return sum(experts[0].numel() * experts[0].element_size() for experts in home.values())


def device_of(homes: Mapping[int, Home]) -> torch.device:
    """Where the home experts of some layers are."""
    return next(experts[0].device for home in homes.values() for experts in home.values())


class GradientReturn:
    """Gradients of replicas on their way home. Making one is a collective call, which sends and does not wait.

    Args:
        peers: all ranks of the plan.
        moves: of the cell, in the expert-parallel group of this rank.
        grads: name -> [replicas here, ...] in ascending order of slot; not written to until `wait` returns.
        what: the exchange in words, for errors.
        first: the number among the peers of the first rank of the group.
        record: told the bytes that arrived here, and the seconds that the caller waited.
    """

    def __init__(
        self,
        peers: PeerGroup,
        moves: CellSchedule,
        grads: Mapping[str, Tensor],
        what: str,
        *,
        first: int = 0,
        record: Callable[[int, float], None] | None = None,
    ) -> None:
        begun = time.monotonic()
        # what comes home is in order of the row of the shard
        rows, replicas_of_row = np.unique(moves.lent["row"], return_counts=True)
        self._rows, self._replicas_of_row = rows.tolist(), replicas_of_row.tolist()
        self._arrived = {name: grad.new_empty((len(moves.lent), *grad.shape[1:])) for name, grad in grads.items()}
        # kept until all has left
        self._sent = grads
        self._exchange = post(
            peers,
            RowMoves(moves.served, "place", first),
            grads,
            RowMoves(moves.lent, "place", first),
            self._arrived,
            what,
        )
        self._record = record
        self._exposed_s = time.monotonic() - begun

    def wait(self) -> dict[str, dict[int, Tensor]]:
        """What came home. All ranks wait for the same ones in the same order.

        Returns:
            name -> row of this rank's shard -> the gradient to be added there, for experts that have replicas elsewhere
            alone. Those of an expert are added in ascending order of their rank, in float32 (float64 for gradients in
            float64).

        Raises:
            TransferError: when a gradient cannot be brought home.
        """
        begun = time.monotonic()
        self._exchange.wait()
        self._sent = {}
        summed = {
            name: dict(zip(self._rows, segment_sums(grad, self._replicas_of_row), strict=True))
            for name, grad in self._arrived.items()
        }
        if self._record is not None:
            num_bytes = sum(grad.numel() * grad.element_size() for grad in self._arrived.values())
            self._record(num_bytes, self._exposed_s + time.monotonic() - begun)
        return summed


def segment_sums(rows: Tensor, lengths_S: Sequence[int]) -> Tensor:
    """Add up neighbouring rows, those of a segment one after the other, on any device alike.

    Args:
        rows: [V, ...], gradients.
        lengths_S: rows of each segment, V in all.

    Returns:
        [S, ...] in float32, or float64 for gradients in float64; zeros for an empty segment.
    """
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if not lengths_S:
        # of which torch cannot take the smallest
        return wide
    lengths = torch.tensor(lengths_S, dtype=torch.int64).to(rows.device, non_blocking=True)
    # on a device, checking the lengths would wait for it
    unchecked = rows.device.type != "cpu"
    return torch.segment_reduce(wide, "sum", lengths=lengths, axis=0, unsafe=unchecked, initial=0.0)
