"""Weights of replicas on their way: one cell's ahead of its use, in the order that the schedule showed before.

A schedule visits cells in the same order in every step: forward, recomputation and backward, as its stage and virtual
chunks have it. All ranks of the group visit them alike, so that they post the same exchanges without asking each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foreroute.ep.transfer import Cell
from foreroute.ep.transfer.peers import PeerGroup, RowMoves, post
from foreroute.plan import CellSchedule

Home = Sequence[Mapping[str, nn.Parameter]]
"""name -> parameter, of each home expert of a layer, in ascending order of its id."""


class Fetch:
    """The weights of the replicas of one cell. Making one is a collective call, which sends and does not wait.

    Args:
        peers: the expert-parallel ranks.
        cell: which.
        moves: of the cell, on this rank.
        home: of the layer, on this rank.
    """

    def __init__(self, peers: PeerGroup, cell: Cell, moves: CellSchedule, home: Home) -> None:
        self.cell = cell
        row_V, some = lent_rows(moves).tolist(), home[0]
        # only what is lent is put together: Megatron keeps a parameter for each expert
        lent = {
            name: torch.stack([home[row][name].detach() for row in row_V])
            if row_V
            else weight.detach().new_empty((0, *weight.shape))
            for name, weight in some.items()
        }
        self._weights = {
            name: weight.detach().new_empty((len(moves.served), *weight.shape)) for name, weight in some.items()
        }
        what = f"fetching the replicas of {cell}"
        leaving, arriving = RowMoves(moves.lent, "place"), RowMoves(moves.served, "place")
        self._exchange = post(peers, leaving, lent, arriving, self._weights, what)

    def wait(self) -> dict[str, Tensor]:
        """Name -> [replicas here, ...] in ascending order of slot. Raises `TransferError` when a rank is gone."""
        self._exchange.wait()
        return self._weights


class FetchAhead:
    """The fetches of one execution.

    Args:
        begin: begins that of a cell; None where no rank serves a replica.
        expected: the micro-step and layer of cells in the order of their visits, of executions before. What those agree
            on that this one has followed so far is fetched.

    Attributes:
        visits: in this execution.
        num_fetches: of cells with replicas.
        num_ahead: of these, that were under way when their cell was visited.
    """

    def __init__(self, begin: Callable[[Cell], Fetch | None], expected: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.visits: list[tuple[int, int]] = []
        self.num_fetches, self.num_ahead = 0, 0
        self._begin, self._expected = begin, expected
        self._layers: set[int] = set()
        self._ahead: Fetch | None = None

    def visit(self, cell: Cell) -> Fetch | None:
        """A cell runs, forward or backward, and its rows have left: its replicas, or None where no rank serves any.

        Posts what is not under way yet, and behind it the next one; waits for neither.
        """
        place = len(self.visits)
        self.visits.append((cell.micro_step, cell.layer))
        self._layers.add(cell.layer)
        self._expected = [order for order in self._expected if order[place : place + 1] == self.visits[place:]]
        fetch = self._take(cell)
        if self._ahead is None and self._expected:
            self._begin_next(cell.step)
        return fetch

    def close(self) -> None:
        """Wait for what nobody came for."""
        if self._ahead is not None:
            self._ahead.wait()
            self._ahead = None

    def _take(self, cell: Cell) -> Fetch | None:
        ahead = self._ahead
        if ahead is not None and ahead.cell == cell:
            self._ahead = None
            self.num_fetches, self.num_ahead = self.num_fetches + 1, self.num_ahead + 1
            return ahead
        fetch = self._begin(cell)
        if fetch is not None:
            self.num_fetches += 1
            self.close()  # the schedule has left its order
        return fetch

    def _begin_next(self, step: int) -> None:
        order, *others = self._expected
        for place in range(len(self.visits), len(order)):
            if any(other[place : place + 1] != order[place : place + 1] for other in others):
                return
            micro_step, layer = order[place]
            # Before its first forward, weights of a layer may still be gathered (overlap_param_gather), and groups with
            # other plans would do that in another order.
            if layer not in self._layers:
                return
            self._ahead = self._begin(Cell(step, micro_step, layer))
            if self._ahead is not None:
                return


def lent_rows(moves: CellSchedule) -> NDArray[np.int64]:
    """int64 [V], the row in this rank's shard of every replica elsewhere, in the order in which gradients come home."""
    row_V = np.empty(len(moves.lent), np.int64)
    row_V[moves.lent["place"]] = moves.lent["row"]
    return row_V
