"""A plan that is executed: what all ranks agree on before it is, and what each layer does in each pass.

The routes of a pass carry its cells (`ReplayRows.cells`). A recomputation runs on the routes of its own pass, and nodes
of autograd keep their cell. So a fetch is bound to (step, micro-step, layer), whatever ran last.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.core.hooks import ModelHooks
from foreroute.core.passes import Pass, PassStack
from foreroute.core.recompute import bind
from foreroute.ep.dispatch import CellRows, gather_counts, rows_on
from foreroute.ep.execution_ranks import ExecutionRanks, MicroBatch
from foreroute.ep.plan_checks import (
    objection_to_counts,
    objection_to_micro_batches,
    objection_to_number,
    objection_to_plan,
)
from foreroute.ep.transfer.engine import TransferEngine, TransferRecord
from foreroute.ep.transfer.replica_weights import Cell, Home
from foreroute.errors import CountsError, PlanError, ReplayError
from foreroute.plan import StepPlan
from foreroute.plan.options import Stage
from foreroute.plan.schedule import CellSchedule, ExecutionSchedule
from foreroute.replay import ReplayRows


class ServedStage(NamedTuple):
    """What is executed in a stage.

    Attributes:
        plan: of the step, or its homes alone.
        schedule: of that, for this rank.
        joined: the same for all groups that hold the same experts; `plan` where there is one.
        weights: the schedule of that, by which weights travel.
        num_replicas_ML: int64 [M, L], of `joined`.
    """

    plan: StepPlan
    schedule: ExecutionSchedule
    joined: StepPlan
    weights: ExecutionSchedule
    num_replicas_ML: NDArray[np.int64]

    @property
    def is_at_home(self) -> bool:
        """Whether no rank has a replica."""
        return not self.num_replicas_ML.any()


class PlanExecution:
    """What `execute` of a model yields. Making one is a collective call of the expert-parallel ranks.

    Args:
        ranks: of this stage.
        step: its number. Executions of one number run on the same weights, which are taken up once, and again behind
            an update.
        plan: the same on all of them.
        counts_MLGE: integers [M, L, G, E], that the plan was made for.
        micro_batches: of this rank.
        home_LE: int16 [L, E], where experts live.
        homes: of the routed layers of this rank, by their position in the model.
        chunks: the positions of those that each chunk of this rank runs in one pass.
        keeps_weights: whether another execution of the same step follows.
        before_publishing: called before weights are copied to host memory.

    Attributes:
        plan: the plan. In a stage that it saves too little in every expert serves at its home (`plan.decision`).
        served: what is executed in each stage.
        executed_ML: int64 [M, L], assignments that the experts of this rank have computed, recomputation left out;
            layers of other stages have none.
        transfers: what travelled here for replicas, once the execution is over.

    Raises:
        PlanError: on every rank alike, when plans differ, or one is for other ranks, layers, experts or homes.
        CountsError: on every rank alike, when the plan was made for other counts, or a micro-batch has others.
    """

    def __init__(
        self,
        ranks: ExecutionRanks,
        step: int,
        plan: StepPlan,
        counts_MLGE: NDArray[np.integer],
        micro_batches: Sequence[MicroBatch],
        home_LE: NDArray[np.int16],
        homes: Mapping[int, Home],
        chunks: Sequence[Sequence[int]],
        *,
        keeps_weights: bool = False,
        before_publishing: Callable[[], None] | None = None,
    ) -> None:
        what = f"agreeing on the plan of step {step}"
        ranks.agree_on_plan(step, plan, what)
        ranks.raise_alike(CountsError, objection_to_number(len(micro_batches), plan.shape[0]), what)
        ranks.raise_alike(PlanError, objection_to_plan(plan, home_LE), what)
        layers = [layer for of_chunk in chunks for layer in of_chunk]
        rank = ranks.consensus.rank
        mine = objection_to_counts(plan, counts_MLGE) or objection_to_micro_batches(
            [each.counts_LE for each in micro_batches], counts_MLGE[:, layers, rank], layers
        )
        ranks.raise_alike(CountsError, mine, what)
        partly = torch.tensor([not each.is_whole for each in micro_batches], dtype=torch.int32)
        self._is_known_M = [not any_ for any_ in ranks.consensus.most(partly, what).tolist()]
        if not all(self._is_known_M):
            warnings.warn(
                f"in {self._is_known_M.count(False)} of {len(self._is_known_M)} micro-steps some rank has rows without "
                "a route that later tokens depend on: no plan knows them, so that all ranks exchange counts in every "
                "cell, and wait for them; record those rows, or leave their sequences out",
                stacklevel=4,
            )
        self.plan = plan
        self.executed_ML = np.zeros(plan.shape[:2], np.int64)
        self.transfers: list[TransferRecord] = []
        self._ranks, self._step, self._micro_batches = ranks, step, list(micro_batches)
        self._counts_MLGE = counts_MLGE
        self._keeps_weights, self._before_publishing = keeps_weights, before_publishing
        recompute = self._compiled(plan.in_stage("recompute"))
        differs = torch.tensor([plan.is_at_home("recompute") != plan.is_at_home("update")], dtype=torch.int32)
        if ranks.owners is not None:
            differs = ranks.everyone.most(differs, what)
        update = self._compiled(plan.in_stage("update")) if differs.item() else recompute
        self.served: dict[Stage, ServedStage] = {"recompute": recompute, "update": update}
        self._chunks = chunks
        # chunks without routers take no part
        self._begun = {chunk: 0 for chunk, of_chunk in enumerate(chunks) if of_chunk}
        self._ran: dict[Cell, Tensor] = {}
        self._homes, self._engine = homes, ranks.engine(homes) if homes else None
        self._has_begun = False

    @contextmanager
    def in_force(self, owner: Executing) -> Iterator[Self]:
        """Be executed by a model, and have weights travel, while the context is open. Leaving it is a collective call.

        Args:
            owner: where the layers of the model look for the plan.

        Raises:
            ReplayError: on every rank alike, when a micro-step was not run, or a router did not do what was replayed.
        """
        if self._engine is not None:
            self._engine.take_records()  # of one that failed
            if not (self._ranks.gathers_late or any(each.is_at_home for each in self.served.values())):
                self._begin_transfers("update")
        owner.execution = self
        try:
            yield self
        finally:
            owner.execution = None
        if self._engine is not None:
            self._engine.end_step(keeps_weights=self._keeps_weights)
            self.transfers = self._engine.take_records()
        self._ranks.raise_alike(ReplayError, self._objection(), f"ending step {self._step}")

    def begin_pass(self, chunk: int, routes: object) -> PassCells:
        """A chunk begins its next forward, on these routes. Asks no other rank.

        Raises:
            CountsError: when these routes are not the ones that were planned. Where other ranks go on, they end with
                this one, at the latest within the timeout of their group.
        """
        micro_step = self._begun[chunk]
        if micro_step == len(self._micro_batches):
            raise CountsError(f"a forward begins after all {micro_step} planned micro-batches; plan as many as are run")
        if routes is not self._micro_batches[micro_step].routes:
            raise CountsError(
                f"micro-batch {micro_step} brings other routes than were planned; replay what was given to execute(), "
                "in the same order"
            )
        self._begun[chunk] += 1
        return PassCells(self, micro_step, self._chunks[chunk], self._micro_batches[micro_step])

    def _begin_transfers(self, stage: Stage) -> TransferEngine:
        """What brings weights, which is told, before the first, whether backward passes follow.

        It is left alone in a stage in which every expert serves at its home.
        """
        engine = self._engine
        assert engine is not None, "there is a layer that runs"
        served = self.served[stage]
        if served.is_at_home:
            return engine
        if not self._has_begun:
            if engine.paths == "host" and self._before_publishing is not None:
                self._before_publishing()
            engine.begin_step(self._step, served.joined, served.weights, served.schedule)
            self._has_begun = True
        engine.updating = stage == "update"
        return engine

    def _compiled(self, plan: StepPlan) -> ServedStage:
        paths, owners = self._ranks.options.paths, self._ranks.owners
        schedule = ExecutionSchedule(plan, self._counts_MLGE, self._ranks.consensus.rank, paths=paths)
        joined, weights = plan, schedule
        if owners is not None:
            joined = owners.join(plan)
            shape = *plan.shape[:2], owners.consensus.size, plan.shape[2]
            weights = ExecutionSchedule(joined, np.zeros(shape, np.int32), owners.consensus.rank, paths=paths)
        return ServedStage(plan, schedule, joined, weights, joined.num_replicas_ML)

    def _moves(self, cell: Cell, stage: Stage) -> CellSchedule | None:
        """The moves of weights in a cell on this rank; None where no rank has a replica."""
        served = self.served[stage]
        has_replicas = served.num_replicas_ML[cell.micro_step, cell.layer]
        return served.weights.cell(cell.micro_step, cell.layer) if has_replicas else None

    def _cell(self, micro_step: int, layer: int) -> Cell:
        """By its place in the plan."""
        return Cell(self._step, micro_step, layer)

    def _exchanged(self, cell: Cell, stage: Stage, counts_E: Tensor) -> CellRows:
        """The rows of a cell in which some rank has rows without a route, which the plan has not counted.

        Args:
            cell: which.
            stage: of the pass.
            counts_E: int64 [E], assignments of this rank.
        """
        counts_GE = gather_counts(self._ranks.group, counts_E, str(cell))
        plan = self.served[stage].plan.cell(cell.micro_step, cell.layer)
        if self._micro_batches[cell.micro_step].is_shared:
            plan = plan.within(counts_GE)
        found = CellSchedule.of(plan, counts_GE, self._ranks.consensus.rank, what=str(cell))
        (rows,) = rows_on(counts_E.device, [found])
        return rows

    def _note(self, cell: Cell, num_rows: int, counts_E: Tensor) -> None:
        """A layer runs for the first time in its pass.

        Args:
            cell: which.
            num_rows: that experts of this rank compute.
            counts_E: integers [E], assignments that its router made.
        """
        self.executed_ML[cell.micro_step, cell.layer] += num_rows
        self._ran[cell] = counts_E

    def _objection(self) -> str | None:
        """What did not run, or which router did not do what was known ahead; None. Waits for the device."""
        fewest = min(self._begun.values(), default=len(self._micro_batches))
        if objection := objection_to_number(fewest, len(self._micro_batches)):
            return objection
        for micro_step, layer in np.ndindex(fewest, self.plan.shape[1]):
            cell = self._cell(micro_step, layer)
            if layer in self._homes and cell not in self._ran:
                return f"{cell} was not executed: the forward of its micro-batch bypassed the layer"
        if not self._ran:
            return None
        for cell, found_E in zip(self._ran, torch.stack(list(self._ran.values())).cpu().numpy(), strict=True):
            if not self._is_known_M[cell.micro_step]:
                continue
            planned_E = self._counts_MLGE[cell.micro_step, cell.layer, self._ranks.consensus.rank]
            if (found_E != planned_E).any():
                expert = int((found_E != planned_E).argmax())
                return (
                    f"{cell}: the router made {found_E[expert]} assignments to expert {expert}, {planned_E[expert]} "
                    "were planned and replayed, so rows were sent to the wrong ranks"
                )
        return None


class PassCells:
    """The cells of one forward of a chunk, and of its recomputation.

    Args:
        execution: of the plan.
        micro_step: of the plan.
        layers: positions of the routed layers of the chunk.
        micro_batch: that is run.

    Attributes:
        execution: the same.
    """

    def __init__(
        self, execution: PlanExecution, micro_step: int, layers: Sequence[int], micro_batch: MicroBatch
    ) -> None:
        self.execution, self._micro_step = execution, micro_step
        self._layers, self._micro_batch = layers, micro_batch
        self._cells = {layer: execution._cell(micro_step, layer) for layer in layers}
        self._names = {layer: str(cell) for layer, cell in self._cells.items()}
        self._rows: dict[int, CellRows] = {}
        self._sent: Tensor | None = None
        self._has_sent = False

    def work(self, layer: int, current: Pass, *, is_again: bool) -> CellWork:
        """What a layer is to do in the pass that these cells belong to, or in its recomputation."""
        execution, cell = self.execution, self._cells[layer]
        assert isinstance(current.rows, ReplayRows), "it has these cells"
        stage: Stage = "update" if current.with_grad else "recompute"
        if stage == "update":  # behind it an optimizer may write to weights, which fused ones do uncounted
            execution._keeps_weights = False
        served, rows = execution.served[stage], None
        if execution._is_known_M[self._micro_step]:
            if not self._rows:  # uploaded once, for recomputation and backward too
                found = [served.schedule.cell(self._micro_step, each) for each in self._layers]
                self._rows = dict(zip(self._layers, rows_on(current.rows.ids_LRK.device, found), strict=True))
            rows = self._rows[layer]
        engine, name = execution._begin_transfers(stage), self._names[layer]
        return CellWork(cell, name, stage, rows, engine, self, current.rows, is_again)

    def sent(self, rows: ReplayRows) -> Tensor | None:
        """int64, which of the R rows experts compute, ascending; None for all.

        Not those of padding, nor of a row without a route that no other row depends on: it gets zeros from the routed
        experts, and costs nothing.
        """
        if not self._has_sent:
            self._sent, self._has_sent = self._found_sent(rows), True
        return self._sent

    def _found_sent(self, rows: ReplayRows) -> Tensor | None:
        num_rows, device, num_routed = len(rows.real_R), rows.real_R.device, self._micro_batch.num_routed
        is_known = self.execution._is_known_M[self._micro_step]
        if is_known and num_routed == num_rows:
            return None
        if is_known:
            # the n-th that is sent, for which nobody waits; a batch of other rows, of which is told later, has fewer
            behind_R = (rows.real_R & rows.routed_R).cumsum(0)
            sent_R = torch.searchsorted(behind_R, torch.arange(1, num_routed + 1, device=device))
            return sent_R.clamp(max=num_rows - 1)
        return rows.real_R.nonzero()[:, 0]


@dataclass(frozen=True, eq=False)
class CellWork:
    """What a layer is to do in one pass over a cell.

    Attributes:
        cell: which.
        name: of the cell, in words.
        stage: of the pass.
        rows: of the cell; None where counts are exchanged first.
        engine: what brings weights.
        cells: of the pass.
        routes: of the pass.
        is_again: whether it is recomputed.
    """

    cell: Cell
    name: str
    stage: Stage
    rows: CellRows | None
    engine: TransferEngine
    cells: PassCells
    routes: ReplayRows
    is_again: bool

    @property
    def moves(self) -> CellSchedule | None:
        """The moves of weights on this rank; None where no rank has a replica."""
        return self.cells.execution._moves(self.cell, self.stage)

    def sent(self) -> Tensor | None:
        """As `PassCells.sent`."""
        return self.cells.sent(self.routes)

    def begin(self, counts_E: Tensor) -> CellRows:
        """The rows of the cell, which begins to run.

        Args:
            counts_E: integers [E], assignments that the router of this rank made.
        """
        execution = self.cells.execution
        rows = execution._exchanged(self.cell, self.stage, counts_E) if self.rows is None else self.rows
        if not self.is_again:
            execution._note(self.cell, sum(rows.receive_G), counts_E)
        return rows


class Executing(Protocol):
    """What knows which plan a model executes.

    Attributes:
        execution: of the plan that is executed now, or None.
    """

    execution: PlanExecution | None


class ExecutingHooks(Executing, Protocol):
    """The hooks of a model whose experts look for the plan that is executed.

    Attributes:
        passes: of the model.
    """

    passes: PassStack

    def recomputing(self, current: Pass, ran: Sequence[Any]) -> AbstractContextManager[None]:
        """See `foreroute.core.hooks.ModelHooks`."""


class InForce:
    """The plan that is executed on a model whose experts look for it.

    Attributes:
        hooks: of the model, since a plan was executed first.
    """

    hooks: ExecutingHooks | None = None

    def work_of(self, layer: int, path: str) -> CellWork | None:
        """What a layer is to do in the pass that runs; None where no plan is executed on it.

        Raises:
            ReplayError: when a plan is executed, and the forward replays none of its routes.
        """
        hooks = self.hooks
        if hooks is None or (hooks.execution is None and _cells(hooks.passes) is None):
            return None
        work = work_of(hooks.passes, layer, path)
        # a checkpoint of experts alone, in which no router runs
        bind(hooks.passes.current, (), hooks.recomputing, until=ModelHooks.run_trunk.__code__)
        return work


def work_of(passes: PassStack, layer: int, path: str) -> CellWork:
    """What a layer is to do in the pass that runs.

    Raises:
        ReplayError: when it replays no routes that were planned.
    """
    cells = _cells(passes)
    if cells is None:
        raise ReplayError(
            f"{path} runs under a plan, and outside of a replay of planned routes; run every forward inside of "
            "execute() on routes that were given to it, of the model itself and not of what torch.compile made of it"
        )
    return cells.work(layer, passes.current, is_again=passes.is_recompute)


def _cells(passes: PassStack) -> PassCells | None:
    """The cells of the pass that runs."""
    rows = None if passes.current is None else passes.current.rows
    return rows.cells if isinstance(rows, ReplayRows) else None
