"""What all ranks must agree on before rows are sent, and how they come to say the same when one does not fit."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from foreroute.ep.execution import BatchRows, StepOrders
from foreroute.ep.transfer.consensus import Votes, agree_on_plan
from foreroute.errors import CountsError, PlanError
from foreroute.plan import StepPlan
from foreroute.plan.counts import counts_digest


def agree_on_step(votes: Votes, orders: StepOrders, home_LE: NDArray[np.int16]) -> str:
    """Make sure that all ranks have the same plan, that it fits the model, and that the counts are its own.

    Args:
        votes: of the ranks.
        orders: of this rank.
        home_LE: int16 [L, E], where experts live.

    Returns:
        `plan_digest` of the plan.

    Raises:
        PlanError: on every rank alike, for different plans, or one for other ranks, layers, experts or homes.
        CountsError: on every rank alike, for counts that are not those of the plan.
        TransferError: when a rank does not answer.
    """
    digest = agree_on_plan(votes, orders.step, orders.plan)
    what = f"agreeing on the homes and counts of step {orders.step}"
    if objections := votes.objections(_objection_to_plan(orders.plan, home_LE), what):
        raise PlanError("; ".join(objections))
    if objections := votes.objections(_objection_to_counts(orders), what):
        raise CountsError("; ".join(objections))
    return digest


def agree_on_rows(votes: Votes, orders: StepOrders, micro_step: int, rows: BatchRows) -> bool:
    """Make sure that all ranks begin the same micro-step, with the rows that were planned.

    Returns:
        Whether counts must be exchanged in every cell: they must where one rank does not know its routes ahead, sends a
        row that is not planned, or has no counts.

    Raises:
        PlanError: on every rank alike, for different micro-steps, or one that the plan does not have.
        CountsError: on every rank alike, when the rows of one are not those planned.
        TransferError: when a rank does not answer.
    """
    num_micro_steps = orders.plan.shape[0]
    objection = None
    if 0 <= micro_step < num_micro_steps:
        objection = _objection_to_rows(orders, micro_step, rows, votes.rank)
    is_known = orders.counts_MLGE is not None and rows.routed_LE is not None and rows.all_planned
    seen = torch.tensor([micro_step, -micro_step, objection is not None, not is_known])
    what = f"beginning micro-step {micro_step} of step {orders.step}"
    most, minus_least, objected, exchanges = votes.most(seen, what).tolist()
    if most != -minus_least or not 0 <= micro_step < num_micro_steps:
        raise PlanError(
            f"ranks begin micro-steps {-minus_least} to {most} of a plan that has {num_micro_steps}; expected the same "
            f"on all of them, from 0 to {num_micro_steps - 1}"
        )
    if objected:
        texts = votes.texts(objection or "", what)
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


def _objection_to_counts(orders: StepOrders) -> str | None:
    plan, counts_MLGE = orders.plan, orders.counts_MLGE
    if counts_MLGE is None:
        return None
    expected = (*plan.shape[:2], plan.topology.num_ranks, plan.shape[2])
    if counts_MLGE.shape != expected:
        return f"counts are {list(counts_MLGE.shape)}, the plan is for {list(expected)}"
    found = counts_digest(counts_MLGE)
    if found != plan.counts_digest:
        return f"counts have digest {found}, the plan was made for {plan.counts_digest}; hand in the counts of the plan"
    return None


def _objection_to_rows(orders: StepOrders, micro_step: int, rows: BatchRows, rank: int) -> str | None:
    if orders.counts_MLGE is None or rows.routed_LE is None:
        return None
    planned_LE = orders.counts_MLGE[micro_step, :, rank]
    if rows.routed_LE.shape != planned_LE.shape:
        return f"rows are routed to {list(rows.routed_LE.shape)} layers and experts, expected {list(planned_LE.shape)}"
    if (rows.routed_LE != planned_LE).any():
        layer, expert = np.argwhere(rows.routed_LE != planned_LE)[0].tolist()
        return (
            f"its rows of micro-step {micro_step} make {rows.routed_LE[layer, expert]} assignments to expert {expert} "
            f"of routed layer {layer}, {planned_LE[layer, expert]} were planned; execute the micro-batches of the plan"
        )
    return None
