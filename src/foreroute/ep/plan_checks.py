"""What keeps a plan, its counts or micro-batches from being executed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from foreroute.ep.agreement import RankConsensus
from foreroute.errors import ForerouteError, PlanError
from foreroute.files.container import checksum
from foreroute.plan import StepPlan
from foreroute.plan.capabilities import Executor, warn_of_lacks
from foreroute.plan.counts import counts_digest

Found = TypeVar("Found")


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


def agree_on_plan(consensus: RankConsensus, step: int, plan: StepPlan, executor: Executor = "hf") -> None:
    """Make sure that all ranks are about to carry out the same plan, and that it is for these ranks.

    What the executor lacks for it is warned of.

    Raises:
        PlanError: on every rank alike, when plans or steps differ, or the plan is for other ranks.
        TransferError: when a rank does not answer.
    """
    mine = f"step {step}, {plan.topology.num_ranks} ranks, plan {plan_digest(plan)}"
    texts = consensus.texts(mine, f"agreeing on the plan of step {step}")
    if len(set(texts)) > 1:
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise PlanError(
            f"ranks hold different plans ({listed}); every rank must be given the same plan of the same step"
        )
    require_ranks(plan, consensus.size)
    warn_of_lacks(plan, executor)


def plan_digest(plan: StepPlan) -> str:
    """128 bit, hexadecimal, of everything that the executor reads in a plan."""
    facts = {
        "topology": repr(plan.topology),
        "shape": repr(plan.shape),
        "slots": plan.slots,
        "gains": repr(sorted(plan.gains.items())),
        "counts": plan.counts_digest,
        "tokens": plan.tokens_digest,
    }
    return checksum(facts, plan.hosts._asdict())


def require_ranks(plan: StepPlan, num_ranks: int) -> None:
    """Raise `PlanError` unless a plan was made for this many ranks."""
    if plan.topology.num_ranks != num_ranks:
        raise PlanError(
            f"the plan is for {plan.topology.num_ranks} ranks, and {num_ranks} are here; plan again for this world size"
        )
