"""The direct path at its simplest: replicas are sent when they are asked for, peer to peer, and nothing is kept."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from foreroute.errors import TransferError
from foreroute.plan import CellPlan, StepPlan
from foreroute.transfer.agreement import require_ranks
from foreroute.transfer.cell import Cell
from foreroute.transfer.exchange import PeerGroup, carry
from foreroute.transfer.moves import replica_moves
from foreroute.transfer.returns import GradientReturn


class DirectWeights:
    """Replica weights by `batch_isend_irecv`; implements `ReplicaWeights`, and never falls back.

    Args:
        peers: the ranks of the plan, in the plan's order.
    """

    def __init__(self, peers: PeerGroup) -> None:
        self._peers = peers
        self._plan: StepPlan | None = None
        self._step = -1

    def begin_step(self, step: int, plan: StepPlan, *, updating: bool, digest: str | None = None) -> None:
        """Put a plan in force. Nothing is kept or prefetched, so `updating` and `digest` make no difference.

        Raises:
            PlanError: when it was made for another number of ranks.
        """
        require_ranks(plan, self._peers.size)
        self._plan, self._step = plan, step

    def fetch(self, cell: Cell, home: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As in `ReplicaWeights`; the tensors are new ones."""
        moves = replica_moves(cell_of(self._plan, self._step, cell)).arrivals
        num_here = int((moves.target_V == self._peers.rank).sum())
        replicas = {name: shard.new_empty((num_here, *shard.shape[1:])) for name, shard in home.items()}
        carry(self._peers, moves, home, replicas, f"fetching the replicas of {cell}").wait()
        return replicas

    def send_home(self, cell: Cell, grads: Mapping[str, Tensor]) -> GradientReturn:
        """As in `ReplicaWeights`."""
        plan = cell_of(self._plan, self._step, cell)
        return GradientReturn(self._peers, plan, grads, f"returning the gradients of {cell}")


def cell_of(plan: StepPlan | None, step: int, cell: Cell) -> CellPlan:
    """The plan of a cell, under the plan of a step.

    Raises:
        TransferError: when the cell is of another step, or no plan is in force.
    """
    if plan is None or cell.step != step:
        in_force = "none is" if plan is None else f"that of step {step} is"
        raise TransferError(
            f"weights of {cell} are asked for, but no plan of that step is in force, {in_force}; call begin_step first"
        )
    return plan.cell(cell.micro_step, cell.layer)
