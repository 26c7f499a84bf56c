"""One plan on all ranks: made by the first of them and shared as it is made, and agreed on before it is executed.

Parts of a plan in the making, whole micro-steps, are broadcast by the thread that runs the model, at points that all
ranks pass: when the plan is shared, and when a micro-step begins. No other thread sends, so broadcasts meet no other
collective.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.ep.execution import ActivePlan, BatchRows
from foreroute.ep.transfer.consensus import RankConsensus, agree_on_plan
from foreroute.errors import CountsError, PlanError
from foreroute.plan import CellPlan, StepPlan, Topology
from foreroute.plan.counts import counts_digest
from foreroute.plan.plan_file import plan_from_bytes, plan_to_bytes
from foreroute.planner import PlanInProgress


class SharedPlan:
    """A plan in the making, the same on all ranks at every point.

    Made by `ExpertParallelModel.share_plan`. Making it and `advance` are collective calls.

    Attributes:
        topology, shape, home_LE: as in `StepPlan`.
        max_load_ML, num_replicas_ML: likewise; 0 in cells that are not planned yet.
        parts: what is known: plans of consecutive micro-steps, from the first on.
        waited_s: seconds that this rank waited for its planner; 0 on those that do not plan.
    """

    def __init__(self, consensus: RankConsensus, plan: PlanInProgress | None) -> None:
        """On the first rank with the plan, or None where it could not be begun; errors are those of `advance`."""
        self._consensus = consensus
        self._plan = plan if consensus.rank == 0 else None
        self.parts: list[StepPlan] = []
        self._place_M: list[tuple[StepPlan, int]] = []
        self.waited_s = 0.0
        what = "waiting for the plan of rank 0"
        size = consensus.from_first(None if self._plan is None else self._plan.num_micro_steps.to_bytes(8), what)
        if size is None:
            raise _no_plan()
        self._num_micro_steps = int.from_bytes(size)
        self.advance(0)

    @property
    def topology(self) -> Topology:
        """What it was planned for."""
        return self.parts[0].topology

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, L, E) of the whole step."""
        return self._num_micro_steps, *self.parts[0].shape[1:]

    @property
    def home_LE(self) -> NDArray[np.int16]:
        """int16 [L, E], the homes during the step."""
        return self.parts[0].home_LE

    @property
    def num_known(self) -> int:
        """Micro-steps that are known, from the first on."""
        return len(self._place_M)

    def cell(self, micro_step: int, layer: int) -> CellPlan:
        """The plan of one cell of a micro-step that is known."""
        part, m = self._place_M[micro_step]
        return part.cell(m, layer)

    def advance(self, micro_step: int) -> list[StepPlan]:
        """Take up what has been planned since, up to a micro-step at least, for which it waits. A collective call.

        Returns:
            The new parts; none, and nothing is sent, once the whole plan is known.

        Raises:
            PlanError: on the ranks that do not plan, when the first cannot; there, its own error.
            TransferError: when a rank does not answer, such as one that died while it planned.
        """
        known = len(self.parts)
        while self.num_known < self._num_micro_steps:
            what = f"waiting for the plan of micro-step {self.num_known}"
            content = self._consensus.from_first(self._next(micro_step), what)
            if content is None:
                raise _no_plan()
            if not content:
                break
            self._add(plan_from_bytes(content))
        return self.parts[known:]

    def _next(self, micro_step: int) -> bytes:
        """The next part, on the rank that plans; empty where it need not be waited for."""
        first = self.num_known
        if self._plan is None or (micro_step < first and self._plan.num_ready == first):
            return b""
        begun = time.monotonic()
        try:
            return plan_to_bytes(self._plan.part(first))
        except BaseException:
            self._consensus.from_first(None, "telling that there is no plan")
            raise
        finally:
            self.waited_s += time.monotonic() - begun

    def _add(self, part: StepPlan) -> None:
        if not self.parts:
            self.max_load_ML, self.num_replicas_ML = np.zeros((2, self._num_micro_steps, part.shape[1]), np.int64)
        begin = self.num_known
        self.parts.append(part)
        self._place_M += [(part, m) for m in range(part.shape[0])]
        self.max_load_ML[begin : self.num_known] = part.max_load_ML
        self.num_replicas_ML[begin : self.num_known] = part.num_replicas_ML


ExecutablePlan = StepPlan | SharedPlan
"""What an executor reads: a whole plan, or one whose later micro-steps are still being planned."""


def agree_on_step(
    consensus: RankConsensus,
    step: int,
    plan: StepPlan | SharedPlan,
    counts_MLGE: NDArray[np.integer] | None,
    home_LE: NDArray[np.int16],
) -> None:
    """Make sure that all ranks have the same plan, that it fits the model, and that the counts are its own.

    Args:
        consensus: of the ranks.
        step: its number.
        plan: that this rank is to put in force.
        counts_MLGE: integers [M, L, G, E], what was planned, or None.
        home_LE: int16 [L, E], where experts live.

    Raises:
        PlanError: on every rank alike, for different plans, or one for other ranks, layers, experts or homes.
        CountsError: on every rank alike, for counts that are not those of the plan.
        TransferError: when a rank does not answer.
    """
    parts = parts_of(plan)
    agree_on_plan(consensus, step, parts[0])
    what = f"agreeing on the homes of step {step}"
    if objections := consensus.objections(_objection_to_plan(plan, home_LE), what):
        raise PlanError("; ".join(objections))
    agree_on_counts(consensus, plan, parts, counts_MLGE)


def parts_of(plan: StepPlan | SharedPlan) -> Sequence[StepPlan]:
    """What is known of a plan: plans of consecutive micro-steps, from the first on."""
    return plan.parts if isinstance(plan, SharedPlan) else [plan]


def agree_on_counts(
    consensus: RankConsensus,
    plan: ExecutablePlan,
    parts: Sequence[StepPlan],
    counts_MLGE: NDArray[np.integer] | None,
    begin: int = 0,
) -> None:
    """Make sure that parts of a plan, the first from micro-step `begin` on, were made for these counts.

    Raises:
        CountsError: on every rank alike, when one has others.
        TransferError: when a rank does not answer.
    """
    objection = _objection_to_counts(plan, parts, counts_MLGE, begin)
    if objections := consensus.objections(objection, "comparing the counts with those of the plan"):
        raise CountsError("; ".join(objections))


def agree_on_rows(
    consensus: RankConsensus, active: ActivePlan, micro_step: int, rows: BatchRows, objection: str | None
) -> bool:
    """Make sure that all ranks begin the same micro-step, with the rows that were planned.

    Args:
        consensus: of the ranks.
        active: the plan in force.
        micro_step: that this rank begins.
        rows: of its micro-batch.
        objection: what else is wrong here, or None.

    Returns:
        Whether counts must be exchanged in every cell: they must where one rank does not know its routes ahead, sends a
        row that is not planned, or has no counts.

    Raises:
        PlanError: on every rank alike, for different micro-steps, or one that the plan does not have.
        CountsError: on every rank alike, when the rows of one are not those planned, or something else is wrong there.
        TransferError: when a rank does not answer.
    """
    num_micro_steps = active.plan.shape[0]
    if objection is None and 0 <= micro_step < num_micro_steps:
        objection = _objection_to_rows(active, micro_step, rows, consensus.rank)
    is_known = active.counts_MLGE is not None and rows.routed_LE is not None and rows.all_planned
    seen = torch.tensor([micro_step, -micro_step, objection is not None, not is_known])
    what = f"beginning micro-step {micro_step} of step {active.step}"
    most, minus_least, objected, exchanges = consensus.most(seen, what).tolist()
    if most != -minus_least or not 0 <= micro_step < num_micro_steps:
        raise PlanError(
            f"ranks begin micro-steps {-minus_least} to {most} of a plan that has {num_micro_steps}; expected the same "
            f"on all of them, from 0 to {num_micro_steps - 1}"
        )
    if objected:
        texts = consensus.texts(objection or "", what)
        raise CountsError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))
    return bool(exchanges)


def _objection_to_plan(plan: ExecutablePlan, home_LE: NDArray[np.int16]) -> str | None:
    if plan.shape[1:] != home_LE.shape:
        return (
            f"the plan is for {plan.shape[1]} routed layers of {plan.shape[2]} experts, the model has "
            f"{home_LE.shape[0]} of {home_LE.shape[1]}"
        )
    if (plan.home_LE != home_LE).any():
        layer, expert = np.argwhere(plan.home_LE != home_LE)[0].tolist()
        return (
            f"routed layer {layer}: expert {expert} lives on rank {home_LE[layer, expert]}, and on rank "
            f"{plan.home_LE[layer, expert]} by the plan; move homes first"
        )
    return None


def _objection_to_counts(
    plan: ExecutablePlan, parts: Sequence[StepPlan], counts_MLGE: NDArray[np.integer] | None, begin: int
) -> str | None:
    if counts_MLGE is None:
        return None
    expected = (*plan.shape[:2], plan.topology.num_ranks, plan.shape[2])
    if counts_MLGE.shape != expected:
        return f"counts are {list(counts_MLGE.shape)}, the plan is for {list(expected)}"
    for part in parts:
        end = begin + part.shape[0]
        found = counts_digest(counts_MLGE[begin:end])
        if found != part.counts_digest:
            made_for = part.counts_digest
            return f"counts have digest {found}, the plan was made for {made_for}; hand in the counts of the plan"
        begin = end
    return None


def _objection_to_rows(active: ActivePlan, micro_step: int, rows: BatchRows, rank: int) -> str | None:
    if active.counts_MLGE is None or rows.routed_LE is None:
        return None
    planned_LE = active.counts_MLGE[micro_step, :, rank]
    if rows.routed_LE.shape != planned_LE.shape:
        return f"rows are routed to {list(rows.routed_LE.shape)} layers and experts, expected {list(planned_LE.shape)}"
    if (rows.routed_LE != planned_LE).any():
        layer, expert = np.argwhere(rows.routed_LE != planned_LE)[0].tolist()
        return (
            f"its rows of micro-step {micro_step} make {rows.routed_LE[layer, expert]} assignments to expert {expert} "
            f"of routed layer {layer}, {planned_LE[layer, expert]} were planned; execute the micro-batches of the plan"
        )
    return None


def _no_plan() -> PlanError:
    return PlanError("rank 0 made no plan; look for the first error in its log")
