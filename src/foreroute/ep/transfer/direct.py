"""The direct path: weights to replicas and their gradients home, peer to peer.

`DirectWeights` is the path at its simplest: replicas are sent when they are asked for, and nothing is kept. Gradients
take this path whatever way the weights came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.ep.transfer.cell import Cell
from foreroute.ep.transfer.consensus import Votes, require_ranks
from foreroute.ep.transfer.moves import gradient_moves, replica_moves
from foreroute.ep.transfer.peers import ATTEMPTS, CHECKSUMS, PeerGroup, carry, damaged, with_checksums
from foreroute.errors import TransferError
from foreroute.plan import CellPlan, StepPlan


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


class GradientReturn:
    """One attempt; implements `Returning`. Making one is a collective call that waits for nobody, and sends.

    Args:
        peers: all ranks of the plan.
        plan: of the cell.
        grads: name -> [replicas here, ...] in ascending order of slot; not written to until `wait` returns.
        what: the exchange in words, for errors.
        checksums: verify what arrives.

    Attributes:
        objection: what is wrong with what arrived, or None; known after `wait`.
        num_bytes: that arrive here.
    """

    def __init__(
        self, peers: PeerGroup, plan: CellPlan, grads: Mapping[str, Tensor], what: str, *, checksums: bool = False
    ) -> None:
        moves, rank = gradient_moves(plan), peers.rank
        sent = with_checksums(grads, range(len(next(iter(grads.values()))))) if checksums else grads
        self._row_V = moves.target_row_V[moves.target_V == rank]
        self._num_rows = int((plan.home_E == rank).sum())
        self._arrived = {name: grad.new_empty((len(self._row_V), *grad.shape[1:])) for name, grad in sent.items()}
        self.objection: str | None = None
        self.num_bytes = sum(self._arrived[name].numel() * grad.element_size() for name, grad in grads.items())
        # kept until all has left
        self._sent = sent
        self._exchange = carry(peers, moves.arrivals, sent, self._arrived, what)

    def wait(self) -> dict[str, Tensor]:
        """As in `Returning`."""
        self._exchange.wait()
        self._sent = {}
        grads = {name: grad for name, grad in self._arrived.items() if name != CHECKSUMS}
        if CHECKSUMS in self._arrived:
            wrong = damaged(grads, self._arrived[CHECKSUMS], range(len(self._row_V)))
            self.objection = f"{len(wrong)} gradients arrived damaged" if wrong else None
        return {name: added(grad, self._row_V, self._num_rows) for name, grad in grads.items()}


class RepeatedReturn:
    """As many attempts as it takes until no rank objects; implements `Returning`.

    Args:
        begin: makes an attempt.
        votes: asked whether what arrived is whole; None where that is not verified.
        what: the exchange in words, for errors.
        record: told the bytes that arrived here, and the seconds that the caller waited.
    """

    def __init__(
        self, begin: Callable[[], GradientReturn], votes: Votes | None, what: str, record: Callable[[int, float], None]
    ) -> None:
        begun = time.monotonic()
        self._begin, self._votes, self._what, self._record = begin, votes, what, record
        self._attempt = begin()
        self._exposed_s = time.monotonic() - begun

    def wait(self) -> dict[str, Tensor]:
        """As in `Returning`.

        Raises:
            TransferError: on every rank alike, when the last attempt failed too.
        """
        begun = time.monotonic()
        for attempt in range(ATTEMPTS):
            if attempt:
                self._attempt = self._begin()
            returned = self._attempt.wait()
            objections = [] if self._votes is None else self._votes.objections(self._attempt.objection, self._what)
            if not objections:
                self._record(self._attempt.num_bytes, self._exposed_s + time.monotonic() - begun)
                return returned
        raise TransferError(f"{self._what} failed {ATTEMPTS} times: " + "; ".join(objections))


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
