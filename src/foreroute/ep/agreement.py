"""What all ranks agree on before a plan is executed: the plan, which the first may make, its counts, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.ep.execution import BatchRows
from foreroute.ep.transfer.consensus import RankConsensus, agree_on_plan
from foreroute.errors import CountsError, PlanError, shown
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
    consensus: RankConsensus,
    plan: StepPlan,
    counts_MLGE: NDArray[np.integer] | None,
    rows_M: Sequence[BatchRows],
) -> list[bool]:
    """Make sure that every rank brings the rows that were planned, in all micro-steps.

    Args:
        consensus: of the ranks.
        plan: agreed on.
        counts_MLGE: integers [M, L, G, E], agreed on, or None.
        rows_M: of the micro-batches of this rank.

    Returns:
        By micro-step, whether counts must be exchanged in every cell: they must where one rank does not know its routes
        ahead, sends a row that is not planned, or has no counts.

    Raises:
        CountsError: on every rank alike, when the rows of one are not those planned.
        TransferError: when a rank does not answer.
    """
    what = "comparing rows with those of the plan"
    if objections := consensus.objections(_objection_to_rows(plan, counts_MLGE, rows_M, consensus.rank), what):
        raise CountsError("; ".join(objections))
    has_counts = counts_MLGE is not None
    unknown = [not (has_counts and rows.routed_LE is not None and rows.all_planned) for rows in rows_M]
    return [bool(any_) for any_ in consensus.most(torch.tensor(unknown, dtype=torch.int32), what).tolist()]


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


def _objection_to_rows(
    plan: StepPlan, counts_MLGE: NDArray[np.integer] | None, rows_M: Sequence[BatchRows], rank: int
) -> str | None:
    if not isinstance(rows_M, Sequence) or not all(isinstance(rows, BatchRows) for rows in rows_M):
        return f"its micro-batches are {shown(rows_M)}; expected a list of BatchRows"
    if len(rows_M) != plan.shape[0]:
        return f"it brings {len(rows_M)} micro-batches, the plan is for {plan.shape[0]}"
    for micro_step, rows in enumerate(rows_M):
        if counts_MLGE is None or rows.routed_LE is None:
            continue
        planned_LE = counts_MLGE[micro_step, :, rank]
        if rows.routed_LE.shape != planned_LE.shape:
            return (
                f"rows are routed to {list(rows.routed_LE.shape)} layers and experts, expected {list(planned_LE.shape)}"
            )
        if (rows.routed_LE != planned_LE).any():
            layer, expert = np.argwhere(rows.routed_LE != planned_LE)[0].tolist()
            return (
                f"its rows of micro-step {micro_step} make {rows.routed_LE[layer, expert]} assignments to expert "
                f"{expert} of routed layer {layer}, {planned_LE[layer, expert]} were planned; bring the micro-batches "
                "of the plan"
            )
    return None
