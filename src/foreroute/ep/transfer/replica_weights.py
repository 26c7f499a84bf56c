"""What the expert-parallel layers ask of whoever moves their replicas, and the simplest answer: the direct path.

`ReplicaWeights` is the contract, and `next_cell` the order in which cells are asked for. `DirectWeights` sends replicas
peer to peer when they are asked for, or in an order that it has seen before. Gradients take this path whatever way the
weights came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from foreroute.ep.transfer.consensus import require_ranks
from foreroute.ep.transfer.peers import Exchange, PeerGroup, RowMoves, post
from foreroute.errors import TransferError
from foreroute.plan import CellSchedule, ExecutionSchedule, StepPlan
from foreroute.plan.capabilities import FetchPath

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


class ReplicaWeights(Protocol):
    """Brings the weights of this rank's replicas, and takes their gradients home.

    All ranks call all methods for the same cells in the same order, those with nothing to send or receive too. A cell
    may be asked for any number of times (recomputation, backward): no call depends on which came before it.
    """

    def fetch(self, cell: Cell, home: Home, *, is_recompute: bool = False) -> Fetch:
        """Begin to bring the replicas that this rank serves in a cell, and behind them those of later cells.

        Called when the rows of the cell have left, so that weights travel while experts compute, and no row waits
        behind them. Nothing is waited for; what is under way already is not begun again.

        Args:
            cell: of the plan in force.
            home: of the layer.
            is_recompute: whether the next call for this cell is that of the backward which follows a recomputation. It
                is given the same weights.

        Raises:
            TransferError: when no plan of the cell is in force, or a rank is gone.
        """
        ...

    def send_home(self, cell: Cell, grads: Mapping[str, Tensor]) -> GradientReturn:
        """Begin to return the gradients of replicas to the ranks that their experts live on.

        Args:
            cell: of the plan in force.
            grads: name -> [replicas here, ...] in the order of `fetch`; not written to until they are home.

        Raises:
            TransferError: when a rank is gone.
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

    Weights are sent when they are asked for. Where cells come in the same order in every step of a kind (forward,
    recomputation and backward, as a pipeline stage and its virtual chunks have it), `end_step` remembers the order, and
    one cell is fetched ahead in it from then on.

    Args:
        peers: the ranks of the plan, in the plan's order.

    Attributes:
        num_fetches: of cells with replicas, in the step in force.
        num_ahead: of these, that were under way when their cell was asked for.
    """

    def __init__(self, peers: PeerGroup) -> None:
        self.num_fetches, self.num_ahead = 0, 0
        self._peers = peers
        self._num_replicas_ML = np.zeros((0, 0), np.int64)
        self._schedule: ExecutionSchedule | None = None
        self._step = -1
        # by the number of micro-steps, and whether backward follows: the (micro-step, layer) of all visits of steps
        # like that, of the last one first; two orders at most
        self._orders: dict[tuple[int, bool], list[list[tuple[int, int]]]] = {}
        self._kind = (0, False)
        self._visits: list[tuple[int, int]] = []
        self._expected: list[list[tuple[int, int]]] = []
        self._homes: dict[int, Home] = {}
        self._ahead: Fetch | None = None
        self._recomputed: dict[Cell, Fetch] = {}

    @property
    def paths(self) -> FetchPath:
        """From peer to peer."""
        return "direct"

    def begin_step(self, step: int, plan: StepPlan, schedule: ExecutionSchedule, *, updating: bool) -> None:
        """Put a plan in force.

        Raises:
            PlanError: when it was made for another number of ranks.
        """
        require_ranks(plan, self._peers.size)
        self._num_replicas_ML, self._schedule, self._step = plan.num_replicas_ML, schedule, step
        self.num_fetches, self.num_ahead = 0, 0
        self._kind = (plan.shape[0], updating)
        self._visits, self._expected = [], list(self._orders.get(self._kind, []))
        self._homes, self._ahead, self._recomputed = {}, None, {}

    def end_step(self) -> None:
        """Wait for what nobody came for, and remember the order of the step. All ranks call it."""
        self._drop_ahead()
        known = self._orders.setdefault(self._kind, [])
        # a forward-only schedule may keep what backward needs, and then takes turns with updates
        known[:] = [self._visits, *(order for order in known if order != self._visits)][:2]
        self._homes, self._recomputed = {}, {}

    def fetch(self, cell: Cell, home: Home, *, is_recompute: bool = False) -> Fetch:
        """As in `ReplicaWeights`; the tensors are new ones."""
        _in_force(self._schedule, self._step, cell)
        if not is_recompute and (recomputed := self._recomputed.pop(cell, None)) is not None:
            return recomputed
        self._homes[cell.layer] = home
        self._visit(cell)
        fetch, was_ahead = self._ahead, True
        if fetch is not None and fetch.cell == cell:
            self._ahead = None
        else:
            fetch, was_ahead = self._begin(cell), False
        if self._has_replicas(cell):
            self.num_fetches, self.num_ahead = self.num_fetches + 1, self.num_ahead + was_ahead
            self._drop_ahead()  # if there is still one, the step has left its order
        if is_recompute:
            self._recomputed[cell] = fetch
        if self._ahead is None and self._expected:
            self._begin_next()
        return fetch

    def send_home(self, cell: Cell, grads: Mapping[str, Tensor]) -> GradientReturn:
        """As in `ReplicaWeights`."""
        moves = cell_of(self._schedule, self._step, cell)
        return GradientReturn(self._peers, moves, grads, f"returning the gradients of {cell}")

    def _begin_next(self) -> None:
        """Begin the next fetch that all orders seen before agree on, if any."""
        order, *others = self._expected
        for place in range(len(self._visits), len(order)):
            if any(other[place : place + 1] != order[place : place + 1] for other in others):
                return
            cell = Cell(self._step, *order[place])
            # Before its first forward, weights of a layer may still be gathered (overlap_param_gather), and groups with
            # other plans would do that in another order.
            if cell.layer not in self._homes:
                return
            if self._has_replicas(cell):
                self._ahead = self._begin(cell)
                return

    def _visit(self, cell: Cell) -> None:
        """Enter that a cell runs; what it expects follows from orders that this one has kept to so far."""
        place = len(self._visits)
        self._visits.append((cell.micro_step, cell.layer))
        self._expected = [order for order in self._expected if order[place : place + 1] == self._visits[place:]]

    def _begin(self, cell: Cell) -> Fetch:
        some = {name: rows[0].detach() for name, rows in self._homes[cell.layer].items()}
        if not self._has_replicas(cell):
            nothing = {name: row.new_empty((0, *row.shape)) for name, row in some.items()}
            return Fetch(cell, lambda: nothing)
        moves = cell_of(self._schedule, self._step, cell)
        replicas = {name: row.new_empty((len(moves.served), *row.shape)) for name, row in some.items()}
        what = f"fetching the replicas of {cell}"
        leaving, arriving = RowMoves(moves.lent, "row"), RowMoves(moves.served, "place")
        exchange = post(self._peers, leaving, self._homes[cell.layer], arriving, replicas, what)
        return Fetch(cell, partial(_arrived, exchange, replicas))

    def _has_replicas(self, cell: Cell) -> bool:
        return bool(self._num_replicas_ML[cell.micro_step, cell.layer])

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.wait()


def _arrived(exchange: Exchange, replicas: dict[str, Tensor]) -> dict[str, Tensor]:
    exchange.wait()
    return replicas


def cell_of(schedule: ExecutionSchedule | None, step: int, cell: Cell) -> CellSchedule:
    """The schedule of a cell, under the plan of a step.

    Raises:
        TransferError: when the cell is of another step, or no plan is in force.
    """
    return _in_force(schedule, step, cell).cell(cell.micro_step, cell.layer)


def _in_force(schedule: ExecutionSchedule | None, step: int, cell: Cell) -> ExecutionSchedule:
    if schedule is None or cell.step != step:
        in_force = "none is" if schedule is None else f"that of step {step} is"
        raise TransferError(
            f"weights of {cell} are asked for, but no plan of that step is in force, {in_force}; call begin_step first"
        )
    return schedule


def expert_bytes(home: Mapping[str, Tensor]) -> int:
    """Bytes of one expert's weights in a layer, whose shard is name -> [experts, ...]."""
    return sum(tensor[0].numel() * tensor.element_size() for tensor in home.values())


class GradientReturn:
    """Gradients of replicas on their way home. Making one is a collective call, which sends and does not wait.

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
        rows, replicas_of_row = np.unique(moves.lent["row"], return_counts=True)
        self._rows, self._replicas_of_row = rows.tolist(), replicas_of_row.tolist()
        self._arrived = {name: grad.new_empty((len(moves.lent), *grad.shape[1:])) for name, grad in grads.items()}
        # kept until all has left
        self._sent = grads
        self._exchange = post(
            peers, RowMoves(moves.served, "place"), grads, RowMoves(moves.lent, "place"), self._arrived, what
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
