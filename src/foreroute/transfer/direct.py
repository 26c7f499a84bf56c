"""The direct path at its simplest: replicas are sent when they are asked for, peer to peer, and nothing is kept."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.balance import CellPlan, StepPlan
from foreroute.errors import PlanError, TransferError
from foreroute.transfer.cell import Cell
from foreroute.transfer.checksums import CHECKSUMS, damaged, with_checksums
from foreroute.transfer.exchange import Exchange, Message, PeerGroup
from foreroute.transfer.moves import Moves, gradient_moves, replica_moves


class DirectWeights:
    """Replica weights by `batch_isend_irecv`; implements `ReplicaWeights`, and never falls back.

    Args:
        peers: the ranks of the plan, in the plan's order.
    """

    def __init__(self, peers: PeerGroup) -> None:
        self._peers = peers
        self._plan: StepPlan | None = None
        self._step = -1

    def begin_step(self, step: int, plan: StepPlan, *, updating: bool) -> None:
        """Put a plan in force. Nothing is kept or prefetched, so `updating` makes no difference.

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

    def send_home(self, cell: Cell, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As in `ReplicaWeights`."""
        returned, _ = return_gradients(
            self._peers, cell_of(self._plan, self._step, cell), grads, f"returning the gradients of {cell}"
        )
        return returned


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


def return_gradients(
    peers: PeerGroup, plan: CellPlan, grads: Mapping[str, Tensor], what: str, *, checksums: bool = False
) -> tuple[dict[str, Tensor], str | None]:
    """Carry the gradients of a cell's replicas home and add them there.

    Args:
        peers: all ranks of the plan.
        plan: of the cell.
        grads: name -> [replicas here, ...] in ascending order of slot.
        what: the exchange in words, for errors.
        checksums: verify what arrives.

    Returns:
        As `ReplicaWeights.send_home`, and what is wrong with what arrived, or None.
    """
    moves, rank = gradient_moves(plan), peers.rank
    sent = with_checksums(grads, range(len(next(iter(grads.values()))))) if checksums else grads
    num_here = int((moves.target_V == rank).sum())
    arrived = {name: grad.new_empty((num_here, *grad.shape[1:])) for name, grad in sent.items()}
    carry(peers, moves.arrivals, sent, arrived, what).wait()
    objection = None
    if checksums:
        sums = arrived.pop(CHECKSUMS)
        if wrong := damaged(arrived, sums, range(num_here)):
            objection = f"{len(wrong)} gradients arrived damaged"
    row_V = moves.target_row_V[moves.target_V == rank]
    return {name: added(grad, row_V, int((plan.home_E == rank).sum())) for name, grad in arrived.items()}, objection


def carry(
    peers: PeerGroup, moves: Moves, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor], what: str
) -> Exchange:
    """Post the moves of rows of `sources` into rows of `targets`, on all ranks alike.

    Args:
        peers: all ranks between which the moves are.
        moves: of all ranks, in the same order everywhere.
        sources: name -> [rows, ...] that `source_row_V` counts; each row contiguous.
        targets: name -> [rows, ...] that `target_row_V` counts; the same names, widths and dtypes on all ranks.
        what: the exchange in words, for errors.
    """
    sends, receives = [], []
    for v in np.argsort(moves.round_V, kind="stable").tolist():
        source, target = int(moves.source_V[v]), int(moves.target_V[v])
        for i, name in enumerate(sorted(sources)):
            number = v * len(sources) + i
            if source == peers.rank:
                row = sources[name].detach()[moves.source_row_V[v]]
                sends.append(Message(target, number, row.contiguous()))
            if target == peers.rank:
                receives.append(Message(source, number, targets[name][moves.target_row_V[v]]))
    return peers.begin(sends, receives, what)


def added(arrived: Tensor, row_V: NDArray[np.int64], num_rows: int) -> Tensor:
    """Add rows into a shard of zeros, one after the other, in the order in which they are given.

    Args:
        arrived: [V, ...], gradients.
        row_V: int64 [V], where each belongs.
        num_rows: of the shard.

    Returns:
        [num_rows, ...] in float32, or float64 for gradients in float64.
    """
    wide = torch.promote_types(arrived.dtype, torch.float32)
    total = torch.zeros((num_rows, *arrived.shape[1:]), dtype=wide, device=arrived.device)
    for v, row in enumerate(row_V.tolist()):
        total[row] += arrived[v]
    return total


def require_ranks(plan: StepPlan, num_ranks: int) -> None:
    """Raise `PlanError` unless a plan was made for this many ranks."""
    if plan.topology.num_ranks != num_ranks:
        raise PlanError(
            f"the plan is for {plan.topology.num_ranks} ranks, and {num_ranks} are here; plan again for this world size"
        )
