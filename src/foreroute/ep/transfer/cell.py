"""What names a cell, which comes next, and what the expert-parallel layer asks of whoever moves its replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Cell(NamedTuple):
    """One routed layer in one micro-step of one step: a barrier for all ranks."""

    step: int
    micro_step: int
    layer: int

    def __str__(self) -> str:
        return f"step {self.step}, micro-step {self.micro_step}, routed layer {self.layer}"


class ReplicaWeights(Protocol):
    """Brings the weights of this rank's replicas, and takes their gradients home.

    All ranks call both methods for the same cells in the same order, those with nothing to send or receive too. A cell
    may be asked for any number of times (recomputation, backward): no call depends on which came before it.
    """

    def fetch(self, cell: Cell, home: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The weights of the replicas that this rank serves in a cell.

        Args:
            cell: of the plan in force.
            home: name -> [E / G, ...], this rank's shard of the layer; experts in ascending order of their id.

        Returns:
            name -> [replicas here, ...] in ascending order of slot, valid until the slots are filled again; or None, on
            every rank alike, when the home placement is in force for this cell: the homes then serve all its tokens,
            in this and every later pass of the step.

        Raises:
            TransferError: when the weights cannot be had at all.
        """
        ...

    def send_home(self, cell: Cell, grads: Mapping[str, Tensor]) -> Returning:
        """Begin to return the gradients of replicas to the ranks that their experts live on.

        Args:
            cell: of the plan in force.
            grads: name -> [replicas here, ...] in the order of `fetch`; not written to until they are home.

        Raises:
            TransferError: when a rank is gone.
        """
        ...


class Returning(Protocol):
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
