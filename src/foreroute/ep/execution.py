"""A plan that is executed: what each layer does in each pass.

The routes of a pass carry its cells (`ReplayRows.cells`). A recomputation runs on the routes of its own pass, and nodes
of autograd keep their cell. So a fetch is bound to (step, micro-step, layer), whatever ran last.

Letters: M micro-steps, L routed layers, G expert-parallel ranks, E experts, K picks, R rows of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.core.hooks import ModelHooks
from foreroute.core.passes import Pass, PassStack
from foreroute.core.recompute import bind
from foreroute.ep.dispatch import CellRows, gather_counts, upload_rows
from foreroute.ep.plan_checks import objection_to_number
from foreroute.ep.transfer.cells import Cell, Home
from foreroute.ep.transfer.engine import TransferEngine, TransferRecord
from foreroute.errors import CountsError, ReplayError
from foreroute.plan import StepPlan
from foreroute.plan.options import Stage
from foreroute.plan.schedule import CellSchedule, ExecutionSchedule
from foreroute.replay import ReplayRows

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch of this rank."""

    routes: object  # that are replayed; whoever begins its forward hands in the same object
    counts_LE: NDArray[np.int64]  # assignments of its rows that have a route, in the layers of this rank
    is_whole: bool  # no other row is sent to experts, so that the plan knows all of them
    num_routed: int  # rows that have a route, those that other ranks send among them where ranks share a batch
    is_shared: bool = False  # rows that the plan does not know shift the part that each rank sends of a shared batch


@dataclass(frozen=True, eq=False)
class PassPlan:
    """What is executed in the recompute or in the update."""

    plan: StepPlan  # of the step, or its homes alone
    schedule: ExecutionSchedule  # of `plan`, for this rank
    joined: StepPlan  # of all groups that hold the same experts
    weights: ExecutionSchedule  # of `joined`, by which weights travel
    num_replicas_ML: NDArray[np.int64]  # of `joined`

    @cached_property
    def is_at_home(self) -> bool:
        """Whether no rank has a replica."""
        return not self.num_replicas_ML.any()


@dataclass(frozen=True, eq=False)
class AgreedStep:
    """What all ranks have agreed to execute."""

    number: int  # executions of one number run on the same weights, which are loaded once, and again behind an update
    plan: StepPlan
    counts_MLGE: NDArray[np.integer]
    micro_batches: list[MicroBatch]
    passes: dict[Stage, PassPlan]
    is_known_M: list[bool]  # no rank has rows that the plan does not know
    keeps_weights: bool  # another execution of the step may follow


class PlanExecution:
    """A plan that is executed, as `execute` yields it.

    Attributes:
        plan: the plan. In a pass that it saves too little in, every expert computes at its home (`plan.decision`).
        hosted: what is executed, by "recompute" and "update"; `hosted[...].plan` is a `StepPlan`.
        executed_ML: int64 [M, L], assignments that the experts of this rank have computed, recomputation left out;
            layers of other stages have none.
        transfers: what travelled here for replicas, once the execution is over.
    """

    def __init__(
        self,
        step: AgreedStep,
        group: dist.ProcessGroup,
        rank: int,
        chunks: Sequence[Sequence[int]],
        homes: Mapping[int, Home],
        engine: TransferEngine | None,
        before_publishing: Callable[[], None],
    ) -> None:
        self.plan, self.hosted = step.plan, step.passes
        self.executed_ML = np.zeros(step.plan.shape[:2], np.int64)
        self.transfers: list[TransferRecord] = []
        self.step, self._group, self._rank, self._chunks = step, group, rank, chunks
        self._homes, self.engine, self._before_publishing = homes, engine, before_publishing
        # chunks without routers take no part
        self._begun = {chunk: 0 for chunk, of_chunk in enumerate(chunks) if of_chunk}
        self._ran: dict[Cell, Tensor] = {}
        self._keeps_weights = step.keeps_weights
        self._has_begun_transfers = False

    def begin_pass(self, chunk: int, routes: object) -> PassCells:
        """Return the cells of the next forward of a chunk, on these routes. Asks no other rank.

        Raises:
            CountsError: when these routes are not the ones that were planned. Where other ranks go on, they end with
                this one, at the latest within the timeout of their group.
        """
        micro_step, batches = self._begun[chunk], self.step.micro_batches
        if micro_step == len(batches):
            raise CountsError(f"a forward begins after all {micro_step} planned micro-batches; plan as many as are run")
        if routes is not batches[micro_step].routes:
            raise CountsError(
                f"micro-batch {micro_step} brings other routes than were planned; replay what was given to execute(), "
                "in the same order"
            )
        self._begun[chunk] += 1
        return PassCells(self, micro_step, self._chunks[chunk], batches[micro_step])

    def begin_transfers(self, name: Stage) -> TransferEngine:
        """Return what brings weights in a pass, which is told, before the first, whether backward passes follow."""
        engine, hosted = self.engine, self.hosted[name]
        assert engine is not None, "there is a layer that runs"
        if hosted.is_at_home:
            return engine
        if not self._has_begun_transfers:
            if engine.paths == "host":
                self._before_publishing()
            engine.begin_step(self.step.number, hosted.joined, hosted.weights, hosted.schedule)
            self._has_begun_transfers = True
        engine.updating = name == "update"
        return engine

    def end_transfers(self) -> None:
        """Wait for weights under way, and keep what is recorded of them."""
        if self.engine is not None:
            self.engine.end_step(keeps_weights=self._keeps_weights)
            self.transfers = self.engine.take_records()

    def require_ran(self) -> None:
        """Raise `ReplayError` if a cell did not run, or a router did not do what was known ahead. Reads the device."""
        num_planned = len(self.step.micro_batches)
        fewest = min(self._begun.values(), default=num_planned)
        if objection := objection_to_number(fewest, num_planned):
            raise ReplayError(objection)
        for micro_step, layer in np.ndindex(fewest, self.plan.shape[1]):
            cell = Cell(self.step.number, micro_step, layer)
            if layer in self._homes and cell not in self._ran:
                raise ReplayError(f"{cell} was not executed: the forward of its micro-batch bypassed the layer")
        if not self._ran:
            return
        # one read for all cells
        for cell, found_E in zip(self._ran, torch.stack(list(self._ran.values())).cpu().numpy(), strict=True):
            planned_E = self.step.counts_MLGE[cell.micro_step, cell.layer, self._rank]
            if self.step.is_known_M[cell.micro_step] and (found_E != planned_E).any():
                expert = int((found_E != planned_E).argmax())
                raise ReplayError(
                    f"{cell}: the router made {found_E[expert]} assignments to expert {expert}, {planned_E[expert]} "
                    "were planned and replayed, so rows were sent to the wrong ranks"
                )

    def _exchange_counts(self, cell: Cell, name: Stage, counts_E: Tensor) -> CellRows:
        """Return the rows of a cell in which some rank has rows without a route, which the plan has not counted."""
        counts_GE = gather_counts(self._group, counts_E, str(cell))
        plan = self.hosted[name].plan.cell(cell.micro_step, cell.layer)
        if self.step.micro_batches[cell.micro_step].is_shared:
            plan = plan.within(counts_GE)
        found = CellSchedule.of(plan, counts_GE, self._rank, what=str(cell))
        (rows,) = upload_rows(counts_E.device, [found])
        return rows


class PassCells:
    """The cells of one forward of a chunk, and of its recomputation."""

    def __init__(
        self, execution: PlanExecution, micro_step: int, layers: Sequence[int], micro_batch: MicroBatch
    ) -> None:
        self.execution, self._micro_step = execution, micro_step
        self._layers, self._micro_batch = layers, micro_batch  # layers by their positions in the model
        self._cells = {layer: Cell(execution.step.number, micro_step, layer) for layer in layers}
        self._names = {layer: str(cell) for layer, cell in self._cells.items()}
        self._rows: dict[int, CellRows] = {}
        self._sent: tuple[Tensor | None] | None = None  # what `CellWork.sent` returns, the same in all layers

    def work(self, layer: int, current: Pass, *, is_recompute: bool) -> CellWork:
        """Return what a layer is to do in the pass that these cells belong to, or in its recomputation."""
        execution, cell = self.execution, self._cells[layer]
        assert isinstance(current.rows, ReplayRows), "it has these cells"
        name: Stage = "update" if current.with_grad else "recompute"
        if name == "update":  # behind it an optimizer may write to weights, and fused ones do not count that
            execution._keeps_weights = False
        hosted, rows = execution.hosted[name], None
        if execution.step.is_known_M[self._micro_step]:
            if not self._rows:  # uploaded once, for recomputation and backward too
                found = [hosted.schedule.cell(self._micro_step, each) for each in self._layers]
                self._rows = dict(zip(self._layers, upload_rows(current.rows.ids_LRK.device, found), strict=True))
            rows = self._rows[layer]
        engine, what = execution.begin_transfers(name), self._names[layer]
        return CellWork(cell, what, name, rows, engine, self, current.rows, is_recompute)


@dataclass(frozen=True, eq=False)
class CellWork:
    """What a layer is to do in one pass over a cell."""

    cell: Cell
    name: str  # of the cell, in words
    pass_name: Stage
    rows: CellRows | None  # None where counts are exchanged first
    engine: TransferEngine
    cells: PassCells
    routes: ReplayRows
    is_recompute: bool

    @property
    def moves(self) -> CellSchedule | None:
        """The moves of weights on this rank; None where no rank has a replica."""
        cell, hosted = self.cell, self.cells.execution.hosted[self.pass_name]
        has_replicas = hosted.num_replicas_ML[cell.micro_step, cell.layer]
        return hosted.weights.cell(cell.micro_step, cell.layer) if has_replicas else None

    def sent(self) -> Tensor | None:
        """Return int64, which of the R rows experts compute, ascending; None for all.

        Not those of padding, nor of a row without a route that no other row depends on: it gets zeros from the routed
        experts, and costs nothing.
        """
        if self.cells._sent is None:
            self.cells._sent = (self._find_sent(),)
        return self.cells._sent[0]

    def _find_sent(self) -> Tensor | None:
        cells, real_R = self.cells, self.routes.real_R
        if not cells.execution.step.is_known_M[self.cell.micro_step]:
            return real_R.nonzero()[:, 0]
        num_routed = cells._micro_batch.num_routed
        if num_routed == len(real_R):
            return None
        # row n is the first at which n + 1 have been counted: of a size that the host knows, so that nobody waits. A
        # batch of other rows, which is refused when the step ends, has fewer, and they lie behind the last row.
        count_R = (real_R & self.routes.routed_R).cumsum(0)
        sent_R = torch.searchsorted(count_R, torch.arange(1, num_routed + 1, device=real_R.device))
        return sent_R.clamp(max=len(real_R) - 1)

    def begin(self, counts_E: Tensor) -> CellRows:
        """Return the rows of the cell, which begins to run, given the assignments of its router, integers [E]."""
        execution, rows = self.cells.execution, self.rows
        if rows is None:
            rows = execution._exchange_counts(self.cell, self.pass_name, counts_E)
        if not self.is_recompute:
            execution.executed_ML[self.cell.micro_step, self.cell.layer] += sum(rows.receive_G)
            execution._ran[self.cell] = counts_E
        return rows


class Executing(Protocol):
    """What knows which plan a model executes now, if it does."""

    execution: PlanExecution | None


class ExecutingHooks(Executing, Protocol):
    """The hooks of a model whose experts look for the plan that is executed."""

    passes: PassStack

    def recomputing(self, current: Pass, ran: Sequence[Any]) -> AbstractContextManager[None]:
        """See `foreroute.core.hooks.ModelHooks`."""


def is_active(hooks: ExecutingHooks | None) -> bool:
    """Return whether a plan is executed on a model, or a pass of one runs."""
    return hooks is not None and (hooks.execution is not None or _cells(hooks.passes) is not None)


def active_work(hooks: ExecutingHooks, layer: int, path: str) -> CellWork:
    """Return what a layer is to do in the pass that runs, of the plan that is executed.

    Raises:
        ReplayError: when the forward replays none of its routes.
    """
    work = work_of(hooks.passes, layer, path)
    # a checkpoint of experts alone, in which no router runs
    bind(hooks.passes.current, (), hooks.recomputing, until=ModelHooks.run_trunk.__code__)
    return work


def work_of(passes: PassStack, layer: int, path: str) -> CellWork:
    """Return what a layer is to do in the pass that runs.

    Raises:
        ReplayError: when it replays no routes that were planned.
    """
    cells = _cells(passes)
    if cells is None:
        raise ReplayError(
            f"{path} runs under a plan, and outside of a replay of planned routes; run every forward inside of "
            "execute() on routes that were given to it, of the model itself and not of what torch.compile made of it"
        )
    return cells.work(layer, passes.current, is_recompute=passes.is_recompute)


def _cells(passes: PassStack) -> PassCells | None:
    rows = None if passes.current is None else passes.current.rows
    return rows.cells if isinstance(rows, ReplayRows) else None
