"""What all ranks agree on before a plan is executed: the plan, which the first may make, its counts, and its rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.ep.execution import ActivePlan, BatchRows
from foreroute.ep.transfer.consensus import RankConsensus, agree_on_plan
from foreroute.errors import CountsError, PlanError
from foreroute.plan import StepPlan
from foreroute.plan.counts import counts_digest
from foreroute.plan.plan_file import plan_from_bytes, plan_to_bytes


def share_plan(consensus: RankConsensus, make: Callable[[], StepPlan]) -> StepPlan:
    """Make a plan on the first rank and give it to all. A collective call.

    Args:
        consensus: of the ranks.
        make: called on the first rank alone; it may wait for a thread.

    Raises:
        PlanError: on the other ranks, when the first cannot make it; there, its own error.
        TransferError: when a rank does not answer, such as one that died while it planned.
    """
    what = "waiting for the plan of rank 0"
    if consensus.rank == 0:
        try:
            plan = make()
            content = plan_to_bytes(plan)
        except BaseException:
            consensus.from_first(None, "telling that there is no plan")
            raise
        consensus.from_first(content, what)
        return plan
    received = consensus.from_first(None, what)
    if received is None:
        raise PlanError("rank 0 made no plan; look for the first error in its log")
    return plan_from_bytes(received)


def agree_on_step(
    consensus: RankConsensus,
    step: int,
    plan: StepPlan,
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
    agree_on_plan(consensus, step, plan)
    what = f"agreeing on the homes of step {step}"
    if objections := consensus.objections(_objection_to_plan(plan, home_LE), what):
        raise PlanError("; ".join(objections))
    if objections := consensus.objections(_objection_to_counts(plan, counts_MLGE), "comparing the counts of the plan"):
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


def _objection_to_plan(plan: StepPlan, home_LE: NDArray[np.int16]) -> str | None:
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


def _objection_to_counts(plan: StepPlan, counts_MLGE: NDArray[np.integer] | None) -> str | None:
    if counts_MLGE is None:
        return None
    expected = (*plan.shape[:2], plan.topology.num_ranks, plan.shape[2])
    if counts_MLGE.shape != expected:
        return f"counts are {list(counts_MLGE.shape)}, the plan is for {list(expected)}"
    found = counts_digest(counts_MLGE)
    if found != plan.counts_digest:
        return f"counts have digest {found}, the plan was made for {plan.counts_digest}; hand in the counts of the plan"
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
