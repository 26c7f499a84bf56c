"""What the expert-parallel layer asks of whoever moves its replicas, and the simplest answer: the direct path.

`ReplicaWeights` is the contract, and `next_cell` the order in which cells are asked for. `DirectWeights` sends replicas
peer to peer when they are asked for, and keeps nothing. Gradients take this path whatever way the weights came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from foreroute.ep.transfer.consensus import require_ranks
from foreroute.ep.transfer.peers import PeerGroup, RowMoves, post
from foreroute.errors import TransferError
from foreroute.plan import CellSchedule, ExecutionSchedule, StepPlan
from foreroute.plan.capabilities import FetchPath


class Cell(NamedTuple):
    """One routed layer in one micro-step of one step: a barrier for all ranks."""

    step: int
    micro_step: int
    layer: int

    def __str__(self) -> str:
        return f"step {self.step}, micro-step {self.micro_step}, routed layer {self.layer}"


class ReplicaWeights(Protocol):
    """Brings the weights of this rank's replicas, and takes their gradients home.

    All ranks call all methods for the same cells in the same order, those with nothing to send or receive too. A cell
    may be asked for any number of times (recomputation, backward): no call depends on which came before it.
    """

    def fetch(self, cell: Cell, home: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of the replicas that this rank serves in a cell.

        Args:
            cell: of the plan in force.
            home: name -> [E / G, ...], this rank's shard of the layer; experts in ascending order of their id.

        Returns:
            name -> [replicas here, ...] in ascending order of slot, valid until the slots are filled again.

        Raises:
            TransferError: when the weights cannot be had.
        """
        ...

    def prefetch(self) -> None:
        """Begin the transfers of the cells after the one fetched last; called when the rows of that one have left.

        So what later cells need travels while experts compute, and no row waits behind it.
        """
        ...

    def send_home(self, cell: Cell, grads: Mapping[str, Tensor]) -> PendingGradients:
        """Begin to return the gradients of replicas to the ranks that their experts live on.

        Args:
            cell: of the plan in force.
            grads: name -> [replicas here, ...] in the order of `fetch`; not written to until they are home.

        Raises:
            TransferError: when a rank is gone.
        """
        ...


class PendingGradients(Protocol):
    """Gradients of replicas on their way home. All ranks wait for the same ones in the same order."""

    def wait(self) -> dict[str, Tensor]:
        """What came home.

        Returns:
            name -> [E / G, ...], to be added to the gradient of this rank's shard. The replicas of an expert are added
            in ascending order of their rank, in float32 (float64 for gradients in float64).

        Raises:
            TransferError: when a gradient cannot be brought home.
        """
        ...


def next_cell(previous: Cell | None, cell: Cell, shape: tuple[int, int], *, updating: bool) -> Cell | None:
    """The cell after `cell`.

    Forward goes up through the layers. In an update it turns back at the last one: backward asks for every cell again,
    and activation checkpointing more than once, before the next micro-step begins.

    Args:
        previous: the last one that ran before `cell` and was another, of the same step; None for the first.
        cell: the cell that runs now.
        shape: M micro-steps and L layers of the step.
        updating: whether backward passes follow; False in recompute.

    Returns:
        None after the last cell of the step.
    """
    num_micro_steps, num_layers = shape
    is_backward = updating and previous is not None and previous.micro_step == cell.micro_step and cell < previous
    if is_backward or (updating and cell.layer == num_layers - 1):
        if cell.layer > 0:
            return cell._replace(layer=cell.layer - 1)
    elif cell.layer < num_layers - 1:
        return cell._replace(layer=cell.layer + 1)
    return Cell(cell.step, cell.micro_step + 1, 0) if cell.micro_step < num_micro_steps - 1 else None


class DirectWeights:
    """Replica weights by `batch_isend_irecv`; implements `ReplicaWeights`.

    Args:
        peers: the ranks of the plan, in the plan's order.
    """

    def __init__(self, peers: PeerGroup) -> None:
        self._peers = peers
        self._schedule: ExecutionSchedule | None = None
        self._step = -1

    @property
    def paths(self) -> FetchPath:
        """From peer to peer."""
        return "direct"

    def begin_step(self, step: int, plan: StepPlan, schedule: ExecutionSchedule, *, updating: bool) -> None:
        """Put a plan in force. Nothing is kept or prefetched, so `updating` makes no difference.

        Raises:
            PlanError: when it was made for another number of ranks.
        """
        require_ranks(plan, self._peers.size)
        self._schedule, self._step = schedule, step

    def fetch(self, cell: Cell, home: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As in `ReplicaWeights`; the tensors are new ones."""
        moves = cell_of(self._schedule, self._step, cell)
        replicas = {name: shard.new_empty((len(moves.served), *shard.shape[1:])) for name, shard in home.items()}
        what = f"fetching the replicas of {cell}"
        post(self._peers, RowMoves(moves.lent, "row"), home, RowMoves(moves.served, "place"), replicas, what).wait()
        return replicas

    def prefetch(self) -> None:
        """Nothing: weights are sent when they are asked for."""

    def send_home(self, cell: Cell, grads: Mapping[str, Tensor]) -> GradientReturn:
        """As in `ReplicaWeights`."""
        moves = cell_of(self._schedule, self._step, cell)
        return GradientReturn(self._peers, moves, grads, f"returning the gradients of {cell}")


def cell_of(schedule: ExecutionSchedule | None, step: int, cell: Cell) -> CellSchedule:
    """The schedule of a cell, under the plan of a step.

    Raises:
        TransferError: when the cell is of another step, or no plan is in force.
    """
    if schedule is None or cell.step != step:
        in_force = "none is" if schedule is None else f"that of step {step} is"
        raise TransferError(
            f"weights of {cell} are asked for, but no plan of that step is in force, {in_force}; call begin_step first"
        )
    return schedule.cell(cell.micro_step, cell.layer)


def expert_bytes(home: Mapping[str, Tensor]) -> int:
    """Bytes of one expert's weights in a layer, whose shard is name -> [experts, ...]."""
    return sum(tensor[0].numel() * tensor.element_size() for tensor in home.values())


class GradientReturn:
    """Implements `PendingGradients`. Making one is a collective call, which sends and does not wait.

    Args:
        peers: all ranks of the plan.
        moves: of the cell.
        grads: name -> [replicas here, ...] in ascending order of slot; not written to until `wait` returns.
        what: the exchange in words, for errors.
        record: told the bytes that arrived here, and the seconds that the caller waited.
    """

    def __init__(
        self,
        peers: PeerGroup,
        moves: CellSchedule,
        grads: Mapping[str, Tensor],
        what: str,
        record: Callable[[int, float], None] | None = None,
    ) -> None:
        begun = time.monotonic()
        # what comes home is in order of the row of the shard
        self._replicas_of_row = np.bincount(moves.lent["row"], minlength=moves.num_home).tolist()
        self._arrived = {name: grad.new_empty((len(moves.lent), *grad.shape[1:])) for name, grad in grads.items()}
        # kept until all has left
        self._sent = grads
        self._exchange = post(
            peers, RowMoves(moves.served, "place"), grads, RowMoves(moves.lent, "place"), self._arrived, what
        )
        self._record = record
        self._exposed_s = time.monotonic() - begun

    def wait(self) -> dict[str, Tensor]:
        """As in `PendingGradients`."""
        begun = time.monotonic()
        self._exchange.wait()
        self._sent = {}
        summed = {name: segment_sums(grad, self._replicas_of_row) for name, grad in self._arrived.items()}
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
    lengths = torch.tensor(lengths_S, dtype=torch.int64).to(rows.device, non_blocking=True)
    # on a device, checking the lengths would wait for it
    unchecked = rows.device.type != "cpu"
    return torch.segment_reduce(wide, "sum", lengths=lengths, axis=0, unsafe=unchecked, initial=0.0)
