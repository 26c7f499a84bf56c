"""Checks that a plan can be executed: for these ranks, layers, experts, homes, counts and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import CountsError, PlanError, shown
from foreroute.files.container import checksum
from foreroute.plan import Links, StepPlan, Topology
from foreroute.plan.counts import counts_digest
from foreroute.plan.hosts import Hosts
from foreroute.trace import RoutingTrace


def planned_counts(
    plan: StepPlan | None,
    planned: NDArray[np.integer] | RoutingTrace | Sequence[RoutingTrace],
    home_LE: NDArray[np.int16],
) -> tuple[StepPlan, NDArray[np.integer]]:
    """Return a plan, of homes alone where there is none, and its counts, integers [M, L, G, E]."""
    if plan is None:
        if not isinstance(planned, np.ndarray):
            raise PlanError(
                f"what is to be executed is given as {shown(planned)}; without a plan, whose packing counts "
                "traces, expected what gather_counts() gives"
            )
        return plan_at_home(planned, home_LE), planned
    if not isinstance(plan, StepPlan):
        raise PlanError(f"the plan is {shown(plan)}; expected what plan() or load_plan() gives, or None")
    if isinstance(planned, np.ndarray):
        return plan, planned
    traces = [planned] if isinstance(planned, RoutingTrace) else planned
    if not (isinstance(traces, Sequence) and all(isinstance(trace, RoutingTrace) for trace in traces)):
        raise PlanError(f"what was planned is given as {shown(planned)}; expected counts or traces")
    return plan, plan.counts_of(traces)


def plan_at_home(counts_MLGE: NDArray[np.integer], home_LE: NDArray[np.int16]) -> StepPlan:
    """Return the plan in which every expert computes at its home. Nothing in it is priced."""
    if counts_MLGE.ndim != 4 or counts_MLGE.shape[1::2] != home_LE.shape or counts_MLGE.dtype.kind not in "iu":
        raise PlanError(
            f"counts are {counts_MLGE.dtype} {list(counts_MLGE.shape)}; expected integers [micro-steps, "
            f"{home_LE.shape[0]}, ranks, {home_LE.shape[1]}] of gather_counts()"
        )
    num_micro_steps, _, num_ranks, _ = counts_MLGE.shape
    hosts = Hosts.with_room(home_LE, num_micro_steps, num_ranks, 0)
    counts_MLE = counts_MLGE.sum(axis=2, dtype=np.int64)
    slowest_ML = np.max([(counts_MLE * (home_LE == rank)).sum(axis=2) for rank in range(num_ranks)], axis=0)
    topology = Topology(num_ranks, num_ranks, 0, Links(1e9, 1e9, 1e9, 1e-5, 1e-5))
    digest = counts_digest(counts_MLGE)
    return StepPlan(topology, home_LE, hosts, slowest_ML, slowest_ML.astype(np.float64), digest, "shared")


def plan_digest(plan: StepPlan) -> str:
    """Return 128 bit, hexadecimal, of everything that the executor reads in a plan."""
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


def require_homes(plan: StepPlan, home_LE: NDArray[np.int16]) -> None:
    """Raise `PlanError` unless a plan is for experts that live where they do, int16 [L, E]."""
    if plan.shape[1:] != home_LE.shape:
        raise PlanError(
            f"the plan is for {plan.shape[1]} routed layers of {plan.shape[2]} experts, the model has "
            f"{home_LE.shape[0]} of {home_LE.shape[1]}"
        )
    if (plan.home_LE != home_LE).any():
        layer, expert = np.argwhere(plan.home_LE != home_LE)[0].tolist()
        raise PlanError(
            f"expert {expert} of routed layer {layer} lives on rank {home_LE[layer, expert]}, and on rank "
            f"{plan.home_LE[layer, expert]} by the plan; call move_homes(plan.home_LE, optimizer) first"
        )


def objection_to_number(num_micro_batches: int, num_planned: int) -> str | None:
    """Return what is wrong when a rank brings, or has run, another number of micro-batches than was planned."""
    if num_micro_batches == num_planned:
        return None
    return f"{num_micro_batches} of {num_planned} planned micro-batches are here; bring and run each of them once"


def require_micro_batches(
    found_MLE: Sequence[NDArray[np.integer]], planned_MLE: NDArray[np.integer], layers: Sequence[int]
) -> None:
    """Raise `CountsError` unless micro-batches make the assignments that were counted in these layers of the model."""
    if objection := objection_to_number(len(found_MLE), len(planned_MLE)):
        raise CountsError(objection)
    for micro_step, (found_LE, planned_LE) in enumerate(zip(found_MLE, planned_MLE, strict=True)):
        if found_LE.shape != planned_LE.shape:
            raise CountsError(
                f"micro-batch {micro_step} is routed to {list(found_LE.shape)} layers and experts, expected "
                f"{list(planned_LE.shape)}"
            )
        if (found_LE != planned_LE).any():
            layer, expert = np.argwhere(found_LE != planned_LE)[0].tolist()
            raise CountsError(
                f"micro-batch {micro_step} makes {found_LE[layer, expert]} assignments to expert {expert} of "
                f"routed layer {layers[layer]}, {planned_LE[layer, expert]} were planned; hand in the micro-batches "
                "that were counted, in the same order"
            )
