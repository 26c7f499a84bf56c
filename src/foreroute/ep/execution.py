"""A plan that is executed: what each layer does in each pass.

The routes of a pass carry its cells (`ReplayRows.cells`). A recomputation runs on the routes of its own pass, and nodes
of autograd keep their cell. So a fetch is bound to (step, micro-step, layer), whatever ran last.

A plan has two passes, "recompute" (of log-probs, without gradients) and "update". *Recomputation* is another thing:
what an activation checkpoint runs again, in the backward pass of an update.

Letters: M micro-steps, L routed layers, G expert-parallel ranks, E experts, K picks, R rows of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from foreroute.core.passes import PassStack
from foreroute.ep.dispatch import CellRows, gather_counts, upload_rows
from foreroute.ep.places import upload_places
from foreroute.ep.plan_checks import objection_to_number
from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.engine import TransferEngine, TransferRecord
from foreroute.errors import CountsError, ReplayError
from foreroute.plan import StepPlan
from foreroute.plan.capabilities import takes_host_memory
from foreroute.plan.hosts import CellPlan
from foreroute.plan.options import PassName
from foreroute.plan.schedule import CellSchedule, ExecutionSchedule
from foreroute.replay import ReplayRows


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """One micro-batch of this rank."""

    routes: object  # that are replayed; whoever begins its forward hands in the same object
    counts_LE: NDArray[np.int64]  # assignments of its rows that have a route, in the layers of this rank
    is_whole: bool  # no other row is sent to experts, so that the plan knows all of them
    # rows that have a route, which are all that is sent, by whichever rank that shares the batch; None sends every row
    num_routed: int | None = None
    is_shared: bool = False  # rows that the plan does not know shift the part that each rank sends of a shared batch


@dataclass(frozen=True, eq=False)
class PassPlan:
    """Plans that the recompute or the update executes."""

    plan: StepPlan  # of the step, or its homes alone
    group_schedule: ExecutionSchedule  # of `plan`, for this rank: rows and gradients travel by it
    joined: StepPlan  # of all groups that hold the same experts
    fetch_schedule: ExecutionSchedule  # of `joined`: weights travel by it

    @cached_property
    def num_replicas_ML(self) -> NDArray[np.int64]:
        return self.joined.num_replicas_ML

    @cached_property
    def is_at_home(self) -> bool:
        """Say whether no rank has a replica."""
        return not self.num_replicas_ML.any()


@dataclass(eq=False, repr=False)
class PlanExecution:
    """A plan that is executed, as `execute` yields it: what all ranks have agreed to do, and what was done.

    Attributes:
        plan: the plan. In a pass that it saves too little in, every expert computes at its home (`plan.decision`).
        passes: what is executed, by "recompute" and "update"; `passes[...].plan` is a `StepPlan`.
        executed_ML: int64 [M, L], assignments that the experts of this rank have computed, recomputation left out;
            layers of other stages have none.
        transfers: what travelled here for replicas, once the execution is over.
    """

    number: int  # executions of one number run on the same weights, which are loaded once, and again behind an update
    plan: StepPlan
    counts_MLGE: NDArray[np.integer]
    micro_batches: list[MicroBatch]
    passes: dict[PassName, PassPlan]
    is_known_M: list[bool]  # no rank has rows that the plan does not know
    keeps_weights: bool  # another execution of the step may follow, and the weights have not been updated
    group: dist.ProcessGroup  # the expert-parallel one
    chunks: Sequence[Sequence[int]]
    engine: TransferEngine | None  # None without a layer
    before_publishing: Callable[[], None]
    num_places: int | None = None  # of a rank, where kernels send rows by places
    executed_ML: NDArray[np.int64] = field(init=False)
    transfers: list[TransferRecord] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.executed_ML = np.zeros(self.plan.shape[:2], np.int64)
        # chunks without routers take no part
        self._begun = {chunk: 0 for chunk, of_chunk in enumerate(self.chunks) if of_chunk}
        self._ran: dict[Cell, Tensor] = {}
        self._has_plan = False  # the engine does
        self._rank = dist.get_rank(self.group)

    def begin_pass(self, chunk: int, routes: object, rows: ReplayRows) -> PassCells:
        """Return the cells of the next forward of a chunk, which replays these rows of `MicroBatch.routes`.

        Raises `CountsError` for other routes than were planned. No other rank is asked: where others go on, they end
        with this one, within the timeout of their group.
        """
        micro_step, batches = self._begun[chunk], self.micro_batches
        if micro_step == len(batches):
            raise CountsError(f"a forward begins after all {micro_step} planned micro-batches; plan as many as are run")
        if routes is not batches[micro_step].routes:
            raise CountsError(
                f"micro-batch {micro_step} brings other routes than were planned; replay what was given to execute(), "
                "in the same order"
            )
        self._begun[chunk] += 1
        pass_name: PassName = "update" if torch.is_grad_enabled() else "recompute"
        if pass_name == "update":  # behind it an optimizer may write to weights, and fused ones do not count that
            self.keeps_weights = False
        engine, plan = self.engine, self.passes[pass_name]
        assert engine is not None, "a chunk that replays has layers"
        if not plan.is_at_home:
            self.begin_transfers(pass_name)
            engine.expects_backward = pass_name == "update"
        # Here and once: for recomputation and backward too, and outside of the selective checkpoints of layers, which
        # number operators.
        sent_R, layers = self._find_sent(micro_step, rows), self.chunks[chunk]
        cell_rows = self.upload_cells(micro_step, layers, plan, rows.ids_LRK.device)
        return PassCells(self, micro_step, plan, engine, cell_rows, sent_R)

    def begin_transfers(self, pass_name: PassName) -> None:
        """Give the engine the plan of a pass, unless it has it or nothing travels."""
        engine, plan = self.engine, self.passes[pass_name]
        if engine is None or plan.is_at_home or self._has_plan:
            return
        if takes_host_memory(engine.options.paths):
            self.before_publishing()
        # passes that are not at home are of one plan
        engine.begin_step(self.number, plan.joined, plan.fetch_schedule, plan.group_schedule)
        self._has_plan = True

    def upload_cells(
        self, micro_step: int, layers: Sequence[int], plan: PassPlan, device: torch.device
    ) -> dict[int, CellRows]:
        """Bring the rows of all cells of a forward to the device, by layer; none where ranks exchange counts first."""
        if not self.is_known_M[micro_step]:
            return {}
        cells = [plan.group_schedule.cell(micro_step, layer) for layer in layers]
        hosts = [plan.plan.cell(micro_step, layer) for layer in layers]
        counts_LGE = [self.counts_MLGE[micro_step, layer] for layer in layers]
        return dict(zip(layers, self._upload(device, cells, hosts, counts_LGE), strict=True))

    def _upload(
        self,
        device: torch.device,
        schedules: Sequence[CellSchedule],
        cells: Sequence[CellPlan],
        counts_CGE: Sequence[NDArray[np.integer]],
    ) -> list[CellRows]:
        rows = upload_rows(device, schedules, with_permutations=self.num_places is None)
        if self.num_places is None:
            return rows
        places = upload_places(device, cells, counts_CGE, self._rank, self.num_places)
        return [of_cell._replace(places=there) for of_cell, there in zip(rows, places, strict=True)]

    def _find_sent(self, micro_step: int, rows: ReplayRows) -> Tensor | None:
        """Return int64, which of the R rows experts compute, ascending; None for all."""
        # A row of padding, or one without a route that no other row depends on, gets zeros from the routed experts, and
        # costs nothing.
        num_routed, real_R = self.micro_batches[micro_step].num_routed, rows.real_R
        if num_routed is None:
            return None
        if not self.is_known_M[micro_step]:
            return real_R.nonzero()[:, 0]
        if num_routed == len(real_R):
            return None
        # row n is the first at which n + 1 have been counted: of a size that the host knows, so that nobody waits. A
        # batch of other rows, which is refused when the step ends, has fewer, and they lie behind the last row.
        count_R = (real_R & rows.routed_R).cumsum(0)
        sent_R = torch.searchsorted(count_R, torch.arange(1, num_routed + 1, device=real_R.device))
        return sent_R.clamp(max=len(real_R) - 1)

    def end_transfers(self) -> None:
        """Wait for weights under way, and keep what is recorded of them."""
        if self.engine is not None:
            self.engine.end_step(keeps_weights=self.keeps_weights)
            self.transfers = self.engine.take_records()

    def require_ran(self) -> None:
        """Raise `ReplayError` if a cell did not run, or a router did not do what was known ahead. Reads the device."""
        num_planned = len(self.micro_batches)
        fewest = min(self._begun.values(), default=num_planned)
        if objection := objection_to_number(fewest, num_planned):
            raise ReplayError(objection)
        layers = {layer for of_chunk in self.chunks for layer in of_chunk}
        for micro_step, layer in np.ndindex(fewest, self.plan.shape[1]):
            cell = Cell(self.number, micro_step, layer)
            if layer in layers and cell not in self._ran:
                raise ReplayError(f"{cell} was not executed: the forward of its micro-batch bypassed the layer")
        if not self._ran:
            return
        # one read for all cells
        for cell, found_E in zip(self._ran, torch.stack(list(self._ran.values())).cpu().numpy(), strict=True):
            planned_E = self.counts_MLGE[cell.micro_step, cell.layer, self._rank]
            if self.is_known_M[cell.micro_step] and (found_E != planned_E).any():
                expert = int((found_E != planned_E).argmax())
                raise ReplayError(
                    f"{cell}: the router made {found_E[expert]} assignments to expert {expert}, {planned_E[expert]} "
                    "were planned and replayed, so rows were sent to the wrong ranks"
                )

    def record_cell(self, cell: Cell, num_rows: int, counts_E: Tensor) -> None:
        """Book what a cell computes here, and what its router did, for the end of the step."""
        self.executed_ML[cell.micro_step, cell.layer] += num_rows
        self._ran[cell] = counts_E

    def exchange_counts(self, cell: Cell, pass_plan: PassPlan, counts_E: Tensor) -> CellRows:
        """Return the rows of a cell in which some rank has rows without a route, which the plan has not counted."""
        counts_GE = gather_counts(self.group, counts_E, str(cell))
        plan = pass_plan.plan.cell(cell.micro_step, cell.layer)
        if self.micro_batches[cell.micro_step].is_shared:
            plan = plan.within(counts_GE)
        found = CellSchedule.of(plan, counts_GE, self._rank, what=str(cell))
        (rows,) = self._upload(counts_E.device, [found], [plan], [counts_GE])
        return rows


@dataclass(frozen=True, eq=False)
class PassCells:
    """The cells of one forward of a chunk, and of its recomputation."""

    execution: PlanExecution
    micro_step: int
    plan: PassPlan  # what is executed in the pass
    engine: TransferEngine
    rows: Mapping[int, CellRows]  # by the layer's position in the model; none where ranks exchange counts first
    sent_R: Tensor | None  # int64, which of the R rows experts compute, ascending; None for all


@dataclass(frozen=True, eq=False)
class CellWork:
    """Work of a layer in one pass over a cell."""

    cells: PassCells
    cell: Cell
    is_recomputation: bool  # an activation checkpoint runs the layer again, in either pass of the plan

    @property
    def num_replicas(self) -> int | None:
        """Number of replicas on this rank in the cell; None where no rank has one."""
        plan, at = self.cells.plan, (self.cell.micro_step, self.cell.layer)
        return len(plan.fetch_schedule.cell(*at).hosted) if plan.num_replicas_ML[at] else None

    def begin(self, counts_E: Tensor) -> CellRows:
        """Return the rows of the cell, which begins to run, given the assignments of its router, integers [E]."""
        execution, rows = self.cells.execution, self.cells.rows.get(self.cell.layer)
        if rows is None:
            rows = execution.exchange_counts(self.cell, self.cells.plan, counts_E)
        if not self.is_recomputation:
            execution.record_cell(self.cell, sum(rows.receive_G), counts_E)
        return rows


class ExecutionHolder(Protocol):
    """Holder of the plan that a model executes now."""

    execution: PlanExecution | None


def find_cells(passes: PassStack) -> PassCells | None:
    """Return the cells of the pass that runs; None where it replays no routes that were planned."""
    rows = None if passes.current is None else passes.current.rows
    return rows.cells if isinstance(rows, ReplayRows) else None


def work_of(passes: PassStack, layer: int, path: str) -> CellWork:
    """Return what a layer is to do in the pass that runs; raise `ReplayError` when that replays no planned routes."""
    cells = find_cells(passes)
    if cells is None:
        raise ReplayError(
            f"{path} runs under a plan, and outside of a replay of planned routes; run every forward inside of "
            "execute() on routes that were given to it, of the model itself and not of what torch.compile made of it"
        )
    cell = Cell(cells.execution.number, cells.micro_step, layer)
    return CellWork(cells, cell, passes.is_recompute)
