"""What ranks agree on: a plan that the first makes for all, and what objects to one, to its counts or micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from foreroute.ep.transfer.consensus import RankConsensus
from foreroute.errors import ForerouteError, PlanError
from foreroute.plan import StepPlan
from foreroute.plan.counts import counts_digest
from foreroute.plan.plan_file import plan_from_bytes, plan_to_bytes

Found = TypeVar("Found")


def share_plan(
    consensus: RankConsensus, make: Callable[[], StepPlan], everyone: RankConsensus | None = None
) -> StepPlan:
    """Make a plan on the first rank of a group and give it to all. A collective call.

    Args:
        consensus: of the group.
        make: called on the first rank alone; it may wait for a thread.
        everyone: the ranks of all groups that make plans at the same time; those of the group by default.

    Raises:
        PlanError: on the other ranks, when a first one cannot make it; there, its own error.
        TransferError: when a rank does not answer, such as one that died while it planned.
    """
    if everyone is None or everyone is consensus:
        return _shared(consensus, make)
    what, failed = "waiting for the plans of all groups", "no plan was made"
    try:
        plan = _shared(consensus, make)
    except BaseException:
        everyone.objections(failed, what)
        raise
    if objections := everyone.objections(None, what):
        raise PlanError(f"another expert-parallel group has no plan ({objections[0]}); look for the first error there")
    return plan


def _shared(consensus: RankConsensus, make: Callable[[], StepPlan]) -> StepPlan:
    """What the first rank makes, on all of a group."""
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


def found_alike(consensus: RankConsensus, kind: type[ForerouteError], what: str, look: Callable[[], Found]) -> Found:
    """What was found here; the error of the first rank that refuses, on all of them. A collective call.

    Args:
        consensus: of the ranks.
        kind: of error that a refusal is, with `ValueError`.
        what: the question in words, for ranks that do not answer.
        look: finds it.
    """
    refusal: Exception | None = None
    try:
        found = look()
    except (kind, ValueError) as error:
        refusal = error
    if objections := consensus.objections(None if refusal is None else str(refusal), what):
        raise kind(objections[0]) from refusal
    return found


def raise_alike(consensus: RankConsensus, error: type[Exception], mine: str | None, what: str) -> None:
    """Raise on every rank, when one of them objects. A collective call."""
    if objections := consensus.objections(mine, what):
        raise error(f"{what}: " + "; ".join(objections))


def objection_to_number(num_micro_batches: int, num_planned: int) -> str | None:
    """What says that this rank brings, or has run, other micro-batches than were planned."""
    if num_micro_batches == num_planned:
        return None
    return f"{num_micro_batches} of {num_planned} planned micro-batches are here; bring and run each of them once"


def objection_to_plan(plan: StepPlan, home_LE: NDArray[np.int16]) -> str | None:
    """What keeps a plan from being executed where experts live, int16 [L, E]."""
    if plan.shape[1:] != home_LE.shape:
        return (
            f"the plan is for {plan.shape[1]} routed layers of {plan.shape[2]} experts, the model has "
            f"{home_LE.shape[0]} of {home_LE.shape[1]}"
        )
    if (plan.home_LE != home_LE).any():
        layer, expert = np.argwhere(plan.home_LE != home_LE)[0].tolist()
        return (
            f"expert {expert} of routed layer {layer} lives on rank {home_LE[layer, expert]}, and on rank "
            f"{plan.home_LE[layer, expert]} by the plan; call move_homes(plan.home_LE, optimizer) first"
        )
    return None


def objection_to_counts(plan: StepPlan, counts_MLGE: NDArray[np.integer]) -> str | None:
    """What says that counts, integers [M, L, G, E], are not those that the plan was made for."""
    expected = (*plan.shape[:2], plan.topology.num_ranks, plan.shape[2])
    if counts_MLGE.shape != expected or counts_MLGE.dtype.kind not in "iu":
        return f"counts are {counts_MLGE.dtype} {list(counts_MLGE.shape)}, the plan is for integers {list(expected)}"
    found = counts_digest(counts_MLGE)
    if found != plan.counts_digest:
        return f"counts have digest {found}, the plan was made for {plan.counts_digest}; hand in the counts of the plan"
    return None


def objection_to_micro_batches(
    found_MLE: Sequence[NDArray[np.integer]], planned_MLE: NDArray[np.integer], layers: Sequence[int]
) -> str | None:
    """What says that the micro-batches of this rank are not those that were counted.

    Args:
        found_MLE: of each, integers [L, E], its assignments.
        planned_MLE: integers [M, L, E].
        layers: which routed layers of the model these are.
    """
    for micro_step, (found_LE, planned_LE) in enumerate(zip(found_MLE, planned_MLE, strict=True)):
        if found_LE.shape != planned_LE.shape:
            return (
                f"micro-batch {micro_step} is routed to {list(found_LE.shape)} layers and experts, expected "
                f"{list(planned_LE.shape)}"
            )
        if (found_LE != planned_LE).any():
            layer, expert = np.argwhere(found_LE != planned_LE)[0].tolist()
            return (
                f"micro-batch {micro_step} makes {found_LE[layer, expert]} assignments to expert {expert} of "
                f"routed layer {layers[layer]}, {planned_LE[layer, expert]} were planned; hand in the micro-batches "
                "that were counted, in the same order"
            )
    return None
