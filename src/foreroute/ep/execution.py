"""One micro-step under a plan, or a forward without one: the rows of a rank, and what each layer is to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from foreroute.core.recompute import bind
from foreroute.ep.dispatch import CellRows, gather_counts, rows_on
from foreroute.ep.transfer import Cell
from foreroute.ep.transfer.engine import TransferEngine
from foreroute.errors import CountsError, ReplayError
from foreroute.layout import locate_rows
from foreroute.plan import CellPlan, CellSchedule, ExecutionSchedule, StepPlan
from foreroute.replay.rows import joined_to_device
from foreroute.trace import RoutingTrace, add_assignments


@dataclass(frozen=True, eq=False)
class BatchRows:
    """The rows of one micro-batch of one rank, flattened batch first.

    Attributes:
        planned_N: bool [N], rows whose assignments are among the planned counts; None for all that are sent.
        sent_N: bool [N], rows that experts compute; None for all. A row that is not sent gets zeros from the routed
            experts, and costs nothing; right for padding, whose results are not used.
        routed_LE: int64 [L, E], assignments of the planned rows, where they are known before the forward, as under
            replay. None when routers are free: counts are then exchanged in every cell.
    """

    planned_N: NDArray[np.bool_] | None = None
    sent_N: NDArray[np.bool_] | None = None
    routed_LE: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if self.planned_N is None or self.sent_N is None:
            return
        if self.planned_N.shape != self.sent_N.shape or (self.planned_N & ~self.sent_N).any():
            raise CountsError(
                f"{self.planned_N.sum()} of {self.planned_N.size} rows are planned and {self.sent_N.sum()} of "
                f"{self.sent_N.size} are sent; expected masks of the same rows, with everything that is planned sent"
            )

    @classmethod
    def replayed(
        cls,
        trace: RoutingTrace,
        input_ids_BT: ArrayLike,
        attention_mask_BT: ArrayLike | None = None,
        starts_BT: ArrayLike | None = None,
    ) -> BatchRows:
        """The rows of a batch on which `trace` is replayed.

        Rows that the trace has a route for are planned. Padding is not sent. Any other row, such as that of a last
        sampled token, is routed by the model itself when its turn comes, so no plan can count it: it is sent to a home
        and counts are exchanged in all cells of a micro-step in which any rank has such a row. A batch that leaves out
        the last token of each sequence has none. A rank without sequences brings padding alone, and a trace of none.

        Args:
            trace: what is replayed.
            input_ids_BT: integers [B, T], as the model is called with.
            attention_mask_BT: 0 or 1 [B, T], 0 for padding; everything is a token by default.
            starts_BT: bool [B, T], the first token of each sequence where rows hold several.

        Raises:
            BatchMismatchError: when batch and trace hold different tokens.
        """
        row_N = locate_rows(trace, input_ids_BT, attention_mask_BT, starts_BT)
        sent_N = row_N >= 0
        planned_N = sent_N.copy()
        planned_N[sent_N] = trace.valid_N[row_N[sent_N]]
        # no routed row of the trace is left out of the batch
        counts_MLGE = np.zeros((1, trace.spec.num_layers, 1, trace.spec.num_experts), np.int32)
        all_S = np.zeros(len(trace), np.int64)
        add_assignments(trace, all_S, all_S, counts_MLGE)
        return cls(planned_N, sent_N, counts_MLGE[0, :, 0].astype(np.int64))

    @property
    def all_planned(self) -> bool:
        """Whether no row is sent that the plan has not counted."""
        if self.planned_N is None:
            return True
        return bool(self.planned_N.all() if self.sent_N is None else (self.planned_N == self.sent_N).all())


@dataclass(frozen=True, eq=False)
class ActivePlan:
    """A plan in force.

    Attributes:
        step: its number.
        plan: of the step.
        counts_MLGE: integers [M, L, G, E], the counts that were planned.
        weights: where replicas come from.
        schedule: of this rank.
        rows_M: of the micro-batches of this rank.
        exchanges_M: whether counts are exchanged in every cell of a micro-step, on all ranks alike.
    """

    step: int
    plan: StepPlan
    counts_MLGE: NDArray[np.integer]
    weights: TransferEngine
    schedule: ExecutionSchedule
    rows_M: Sequence[BatchRows]
    exchanges_M: Sequence[bool]


class Execution:
    """What `ExpertParallelModel.executing` yields, and what is in force outside of it.

    Args:
        group: the ranks.
        num_layers: L.
        active_plan: the plan in force; None for live routing with every expert at its home.
        micro_step: of the plan.

    Attributes:
        rows: of this rank's micro-batch.
        active_plan, micro_step: the same.
        is_recomputing: whether what runs now has run before.
        names: the cells in words.
        executed_L: int64 [L], assignments that this rank has computed in each layer; recomputation does not count.
    """

    def __init__(
        self, group: dist.ProcessGroup, num_layers: int, active_plan: ActivePlan | None = None, micro_step: int = 0
    ) -> None:
        self._group = group
        self.active_plan, self.micro_step = active_plan, micro_step
        self.is_recomputing = False
        self.executed_L = np.zeros(num_layers, np.int64)
        self._runs_L = [0] * num_layers
        self._device_rows: list[CellRows] | None = None
        self._indices: dict[str, Tensor | None] = {}
        self._found_LE: Tensor | None = None
        self._differs: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._is_known = False
        if active_plan is None:
            self.rows = BatchRows()
            self.names = [f"routed layer {layer}" for layer in range(num_layers)]
            return
        self.rows = active_plan.rows_M[micro_step]
        self.names = [str(Cell(active_plan.step, micro_step, layer)) for layer in range(num_layers)]
        self._is_known = not active_plan.exchanges_M[micro_step]
        self._has_replicas_L = active_plan.plan.num_replicas_ML[micro_step] > 0

    def begin_cell(
        self, layer: int, path: str, ids_NK: Tensor, home_E: NDArray[np.int16], row_multiple: int
    ) -> CellRows:
        """A layer runs.

        Args:
            layer: position among the routed layers.
            path: of its module, for errors.
            ids_NK: int64 [N, K], the expert of each assignment.
            home_E: int16 [E], the rank that every expert lives on.
            row_multiple: the rows of a group are padded to a multiple of this.

        Returns:
            Its rows.

        Raises:
            ReplayError: when it has run in this execution already.
            CountsError: when the rows are not those announced; or counts are exchanged and are not those of the plan,
                on every rank alike.
            PlanError: when a plan gives replicas more than there is; on every rank alike.
        """
        self._require_rows(path, len(ids_NK))
        sent_A = self.sent_assignments(ids_NK)
        if not self._is_known:
            counts_GE = self._exchanged_counts(layer, ids_NK, sent_A, len(home_E))
            rank, name = dist.get_rank(self._group), self.names[layer]
            cell = CellPlan.homes_only(home_E, len(counts_GE))
            if self.active_plan is not None and self._has_replicas_L[layer]:
                cell = self.active_plan.plan.cell(self.micro_step, layer)
            schedule = CellSchedule.of(cell, counts_GE, rank, row_multiple=row_multiple, what=name)
            (rows,) = rows_on(ids_NK.device, [schedule])
        else:
            rows = self._known_rows(ids_NK.device)[layer]
        if self.is_recomputing:
            return rows
        self._runs_L[layer] += 1
        if self.active_plan is not None and self._runs_L[layer] > 1:
            raise ReplayError(
                f"{path} runs a second time in {self.names[layer]}; a plan has one cell for each layer and micro-step: "
                "open executing() anew for every forward"
            )
        self.executed_L[layer] += sum(rows.receive_G)
        if self._is_known:
            self._note_found(layer, ids_NK, sent_A, len(home_E))
        return rows

    def served(self, layer: int) -> tuple[Cell, TransferEngine] | None:
        """A cell that has replicas on any rank, and where they come from; None for one that has none."""
        if self.active_plan is None or not self._has_replicas_L[layer]:
            return None
        return Cell(self.active_plan.step, self.micro_step, layer), self.active_plan.weights

    def sent_assignments(self, ids_NK: Tensor) -> Tensor | None:
        """int64, which of the N x K assignments experts compute, in their order; None for all."""
        return self._assignments("sent", self.rows.sent_N, ids_NK)

    def end(self) -> None:
        """The forward is over. What its routers did is brought to the host, which does not wait for it.

        Raises:
            ReplayError: when a layer did not run. Every rank finds the same: rows of one that runs wait for the others.
        """
        for name, runs in zip(self.names, self._runs_L, strict=True):
            if not runs:
                raise ReplayError(f"{name} was not executed: no forward of the model ran, or it bypassed the layer")
        if self._found_LE is None:
            return
        assert self.rows.routed_LE is not None, "found is compared where counts were known ahead"
        differs_L = (self._found_LE != joined_to_device([self.rows.routed_LE], self._found_LE.device)).any(dim=1)
        brought = None
        on_host_L = differs_L.to("cpu", non_blocking=True)
        if differs_L.is_cuda:
            brought = torch.cuda.Event()
            brought.record()
        self._differs = on_host_L, brought

    def misrouted(self) -> str | None:
        """Which layer's routers did not do what was known ahead, in words, or None. Waits for the forward's end."""
        if self._differs is None:
            return None
        differs_L, brought = self._differs
        if brought is not None:
            brought.synchronize()
        for name, differs in zip(self.names, differs_L.tolist(), strict=True):
            if differs:
                return f"{name}: routers made other assignments than BatchRows.routed_LE, so rows went astray"
        return None

    def _require_rows(self, path: str, num_rows: int) -> None:
        for mask_N in (self.rows.planned_N, self.rows.sent_N):
            if mask_N is not None and len(mask_N) != num_rows:
                raise CountsError(
                    f"{path} is given {num_rows} rows, BatchRows tells of {len(mask_N)}; make it from the batch "
                    "that the model is called with, padding included"
                )

    def _assignments(self, name: str, mask_N: NDArray[np.bool_] | None, ids_NK: Tensor) -> Tensor | None:
        if name not in self._indices:
            self._indices[name] = None
            if mask_N is not None and not mask_N.all():
                chosen = np.flatnonzero(np.repeat(mask_N, ids_NK.shape[1]))
                self._indices[name] = joined_to_device([chosen], ids_NK.device)
        return self._indices[name]

    def _known_rows(self, device: torch.device) -> list[CellRows]:
        """Of all cells of the micro-step."""
        if self._device_rows is None:
            active = self.active_plan
            assert active is not None, "counts that are known ahead are those of a plan"
            cells = [active.schedule.cell(self.micro_step, layer) for layer in range(len(self.names))]
            self._device_rows = rows_on(device, cells)
        return self._device_rows

    def _note_found(self, layer: int, ids_NK: Tensor, sent_A: Tensor | None, num_experts: int) -> None:
        """What routers did, looked at before weights change, so that the device is not waited for."""
        if self._found_LE is None:
            self._found_LE = torch.zeros(len(self.names), num_experts, dtype=torch.int64, device=ids_NK.device)
            self._ones_A = ids_NK.new_ones(ids_NK.numel() if sent_A is None else len(sent_A))
        self._found_LE[layer].index_add_(0, _chosen(ids_NK, sent_A), self._ones_A)

    def _exchanged_counts(
        self, layer: int, ids_NK: Tensor, sent_A: Tensor | None, num_experts: int
    ) -> NDArray[np.int64]:
        """int64 [G, E], assignments of every rank to every expert."""
        planned_A = sent_A
        if self.rows.planned_N is not None:
            planned_A = self._assignments("planned", self.rows.planned_N, ids_NK)
        mine = torch.stack([_count(_chosen(ids_NK, each), num_experts) for each in (planned_A, sent_A)])
        planned_GE, sent_GE = gather_counts(self._group, mine, self.names[layer])
        self._require_planned(layer, planned_GE)
        return np.asarray(sent_GE)

    def _require_planned(self, layer: int, found_GE: NDArray[np.int64]) -> None:
        if self.active_plan is None:
            return
        planned_GE = self.active_plan.counts_MLGE[self.micro_step, layer]
        if (found_GE != planned_GE).any():
            rank, expert = np.argwhere(found_GE != planned_GE)[0].tolist()
            raise CountsError(
                f"{self.names[layer]}: rank {rank} routes {found_GE[rank, expert]} assignments to expert {expert}, "
                f"the plan was made for {planned_GE[rank, expert]}. Execute the micro-batches that were planned"
            )


class ExecutionStack:
    """The executions of one model, the one in force on top: backward may run parts of other forwards again.

    Args:
        outside: in force where nothing else is.
    """

    def __init__(self, outside: Execution) -> None:
        self._stack = [outside]

    @property
    def top(self) -> Execution:
        """The execution in force."""
        return self._stack[-1]

    def in_force(self) -> Execution:
        """The same; checkpoints around the caller will put it back in force when they run again."""
        bind(self.top, (), self.recomputing)
        return self.top

    @contextmanager
    def recomputing(self, execution: Execution, ran: Sequence[Any] = ()) -> Iterator[None]:
        """Put one back in force while a part of its forward runs again."""
        before, execution.is_recomputing = execution.is_recomputing, True
        try:
            with self.on_top(execution):
                yield
        finally:
            execution.is_recomputing = before

    @contextmanager
    def on_top(self, execution: Execution) -> Iterator[None]:
        """Put one in force while the context is open."""
        self._stack.append(execution)
        try:
            yield
        finally:
            self._stack.pop()


def _chosen(ids_NK: Tensor, assignments: Tensor | None) -> Tensor:
    every = ids_NK.reshape(-1)
    return every if assignments is None else every.index_select(0, assignments)


def _count(ids: Tensor, num_experts: int) -> Tensor:
    """int64 [E]."""
    return torch.zeros(num_experts, dtype=torch.int64, device=ids.device).index_add_(0, ids, torch.ones_like(ids))
