"""The gradients of a cell's replicas on their way home, which is peer to peer, and what is made of them there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.errors import TransferError
from foreroute.plan import CellPlan
from foreroute.transfer.agreement import Votes
from foreroute.transfer.checksums import CHECKSUMS, damaged, with_checksums
from foreroute.transfer.exchange import ATTEMPTS, PeerGroup, carry
from foreroute.transfer.moves import gradient_moves


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
