"""One micro-step under a plan, or a forward without one: the rows of a rank, and what each layer is to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from foreroute.core.recompute import bind
from foreroute.ep.dispatch import CellRows, MicroStepRows, gather_counts
from foreroute.ep.transfer import Cell, ReplicaWeights
from foreroute.errors import CountsError, ReplayError
from foreroute.layout import locate_rows
from foreroute.plan import CellPlan, ExecutionSchedule, StepPlan
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
        counts_MLGE: integers [M, L, G, E], the counts that were planned; None where only the plan is known.
        weights: where replicas come from.
        schedule: of this rank.
        rows_M: of the micro-batches of this rank.
        exchanges_M: whether counts are exchanged in every cell of a micro-step, on all ranks alike.
    """

    step: int
    plan: StepPlan
    counts_MLGE: NDArray[np.integer] | None
    weights: ReplicaWeights
    schedule: ExecutionSchedule
    rows_M: Sequence[BatchRows]
    exchanges_M: Sequence[bool]


@dataclass(eq=False)
class Execution:
    """What `ExpertParallelModel.executing` yields, and what is in force outside of it.

    Attributes:
        group: the ranks.
        num_layers: L.
        rows: of this rank's micro-batch.
        active_plan: the plan in force; None for live routing with every expert at its home.
        micro_step: of the plan.
        exchanges: whether counts are exchanged in every cell.
        executed_L: int64 [L], assignments that this rank has computed in each layer; recomputation does not count.
    """

    group: dist.ProcessGroup
    num_layers: int
    rows: BatchRows = field(default_factory=BatchRows)
    active_plan: ActivePlan | None = None
    micro_step: int = 0
    exchanges: bool = True

    def __post_init__(self) -> None:
        self.executed_L = np.zeros(self.num_layers, np.int64)
        self._runs_L = [0] * self.num_layers
        self._recomputing = 0
        self._differs: dict[int, Tensor] = {}
        self._indices: dict[str, Tensor | None] = {}
        self._rows: MicroStepRows | None = None

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """A part of the forward runs again, in backward."""
        self._recomputing += 1
        try:
            yield
        finally:
            self._recomputing -= 1

    @property
    def is_recomputing(self) -> bool:
        """Whether what runs now has run before."""
        return self._recomputing > 0

    def begin_layer(self, layer: int, path: str) -> None:
        """A layer runs.

        Raises:
            ReplayError: when it has run in this execution already.
        """
        if self.is_recomputing:
            return
        self._runs_L[layer] += 1
        if self.active_plan is not None and self._runs_L[layer] > 1:
            raise ReplayError(
                f"{path} runs a second time in {self.what(layer)}; a plan has one cell for each layer and micro-step: "
                "open executing() anew for every forward"
            )

    def end_layer(self, layer: int, num_rows: int) -> None:
        """A layer has received this many assignments."""
        if not self.is_recomputing:
            self.executed_L[layer] += num_rows

    def cell(self, layer: int) -> tuple[Cell, CellPlan, ReplicaWeights] | None:
        """A cell with its plan, and where its replicas come from; None where it has none on any rank."""
        if self.active_plan is None:
            return None
        plan = self.active_plan.plan.cell(self.micro_step, layer)
        if not len(plan.expert_R):
            return None
        return Cell(self.active_plan.step, self.micro_step, layer), plan, self.active_plan.weights

    def rows_of(self, layer: int, device: torch.device) -> CellRows | None:
        """The rows of a cell whose counts were known ahead; None where they depend on what is found now."""
        if self.active_plan is None or self.exchanges:
            return None
        if self._rows is None:
            schedule = self.active_plan.schedule
            cells = {each: schedule.cell(self.micro_step, each) for each in range(self.num_layers)}
            self._rows = MicroStepRows(cells, device)
        return self._rows[layer]

    def what(self, layer: int) -> str:
        """The cell in words."""
        if self.active_plan is None:
            return f"routed layer {layer}"
        return str(Cell(self.active_plan.step, self.micro_step, layer))

    def sent_rows(self, device: torch.device) -> Tensor | None:
        """int64, the rows that experts compute; None for all."""
        return self._rows_in("sent", self.rows.sent_N, device)

    def counts_GE(self, layer: int, ids_NK: Tensor, num_experts: int) -> NDArray[np.int64]:
        """int64 [G, E], assignments of every rank to every expert, in a layer that runs now.

        Raises:
            CountsError: when counts are exchanged and are not those of the plan; on every rank alike.
        """
        sent = self.sent_rows(ids_NK.device)
        sent_E = _count(ids_NK, sent, num_experts)
        if not self.exchanges:
            return self._known_counts_GE(layer, sent_E)
        planned = sent
        if self.rows.planned_N is not None:
            planned = self._rows_in("planned", self.rows.planned_N, ids_NK.device)
        mine = torch.stack([_count(ids_NK, planned, num_experts), sent_E])
        planned_GE, sent_GE = gather_counts(self.group, mine, self.what(layer))
        self._require_planned(layer, planned_GE)
        exchanged_GE: NDArray[np.int64] = sent_GE
        return exchanged_GE

    def end(self) -> RouterCheck:
        """The forward is over. What its routers did is brought to the host, which does not wait for it.

        Raises:
            ReplayError: when a layer did not run. Every rank finds the same: rows of one that runs wait for the others.
        """
        for layer, runs in enumerate(self._runs_L):
            if not runs:
                raise ReplayError(
                    f"{self.what(layer)} was not executed: no forward of the model ran, or it bypassed the layer"
                )
        layers, brought = [self.what(layer) for layer in self._differs], None
        differing = torch.stack(list(self._differs.values())) if layers else torch.zeros(0, dtype=torch.bool)
        on_host = differing.to("cpu", non_blocking=True)
        if differing.is_cuda:
            brought = torch.cuda.Event()
            brought.record()
        return RouterCheck(layers, on_host, brought)

    def _rows_in(self, name: str, mask_N: NDArray[np.bool_] | None, device: torch.device) -> Tensor | None:
        if name not in self._indices:
            chosen_N = None if mask_N is None or mask_N.all() else np.flatnonzero(mask_N)
            self._indices[name] = None if chosen_N is None else torch.from_numpy(chosen_N).to(device, non_blocking=True)
        return self._indices[name]

    def _known_counts_GE(self, layer: int, sent_E: Tensor) -> NDArray[np.int64]:
        counts_MLGE = None if self.active_plan is None else self.active_plan.counts_MLGE
        assert counts_MLGE is not None, "counts that are known ahead are those of a plan"
        counts_GE: NDArray[np.int64] = counts_MLGE[self.micro_step, layer].astype(np.int64)
        announced_E = torch.from_numpy(counts_GE[dist.get_rank(self.group)])
        # looked at before weights change, so that the device is not waited for
        self._differs[layer] = (sent_E != announced_E.to(sent_E.device, non_blocking=True)).any()
        return counts_GE

    def _require_planned(self, layer: int, found_GE: NDArray[np.int64]) -> None:
        if self.active_plan is None:
            return
        if self.active_plan.counts_MLGE is not None:
            planned_GE = self.active_plan.counts_MLGE[self.micro_step, layer]
            if (found_GE != planned_GE).any():
                rank, expert = np.argwhere(found_GE != planned_GE)[0].tolist()
                raise CountsError(
                    f"{self.what(layer)}: rank {rank} routes {found_GE[rank, expert]} assignments to expert {expert}, "
                    f"the plan was made for {planned_GE[rank, expert]}. Execute the micro-batches that were planned"
                )
            return
        found = int(self.active_plan.plan.cell(self.micro_step, layer).loads_G(found_GE).max())
        planned = int(self.active_plan.plan.max_load_ML[self.micro_step, layer])
        if found != planned:
            raise CountsError(
                f"{self.what(layer)}: the slowest rank has {found} assignments, {planned} by the plan, which was made "
                "for other counts. Execute the micro-batches that were planned"
            )


@dataclass(frozen=True, eq=False)
class RouterCheck:
    """What the routers of one forward did, to be looked at later.

    Attributes:
        layers: in words, those whose routes were known ahead.
        differing: bool, on the host, whether each made other assignments.
        brought: after it, they are there; None where nothing is under way.
    """

    layers: Sequence[str]
    differing: Tensor
    brought: torch.cuda.Event | None

    def misrouted(self) -> str | None:
        """Which layer's routers did not do what was known ahead, in words, or None. Waits for the forward's end."""
        if self.brought is not None:
            self.brought.synchronize()
        for layer, differs in zip(self.layers, self.differing.tolist(), strict=True):
            if differs:
                return f"{layer}: routers made other assignments than BatchRows.routed_LE, so rows went astray"
        return None


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
        with self.on_top(execution), execution.recomputing():
            yield

    @contextmanager
    def on_top(self, execution: Execution) -> Iterator[None]:
        """Put one in force while the context is open."""
        self._stack.append(execution)
        try:
            yield
        finally:
            self._stack.pop()


def _count(ids_NK: Tensor, rows: Tensor | None, num_experts: int) -> Tensor:
    """int64 [E], assignments of these rows."""
    ids = (ids_NK if rows is None else ids_NK.index_select(0, rows)).reshape(-1)
    return torch.zeros(num_experts, dtype=torch.int64, device=ids.device).index_add_(0, ids, torch.ones_like(ids))
