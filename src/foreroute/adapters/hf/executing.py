"""What plans need of a Hugging Face model: that it is spread, its micro-batches, and the counts of traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foreroute.adapters.hf.trace_rows import TraceRows
from foreroute.ep import ExpertParallelModel
from foreroute.ep.execution_ranks import MicroBatch
from foreroute.ep.plan_checks import found_alike
from foreroute.errors import AttachError, PlanError, TraceError, shown
from foreroute.plan import Links, StepPlan, Topology
from foreroute.plan.counts import counts_digest
from foreroute.plan.hosts import Hosts
from foreroute.trace import RoutingTrace

if TYPE_CHECKING:
    from foreroute.adapters.hf.model import RoutedTransformer


def spread_of(routed: RoutedTransformer) -> ExpertParallelModel:
    """What plans are executed on.

    Raises:
        AttachError: when the experts of the model are not spread by our implementation, or cannot be fetched.
    """
    model = routed.model
    if routed.spread is None:
        raise AttachError(
            f"no experts of this {type(model).__name__} are spread over ranks by foreroute; load it by "
            "from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=G, ep_size=G, "
            'ep_implementation="foreroute"))'
        )
    if routed.spec.num_experts != routed.spread.home_LE.shape[1]:
        raise AttachError(
            f"routers of this {type(model).__name__} choose among {routed.spec.num_experts}, and layers have "
            f"{routed.spread.home_LE.shape[1]} experts; plans know no choice that is not served"
        )
    distributed = getattr(getattr(model, "config", None), "distributed_config", None)
    if getattr(distributed, "fsdp_cpu_offload", False):
        raise AttachError(
            "the model was loaded with fsdp_cpu_offload=True, which keeps experts on the host, from where replicas "
            "cannot be fetched; load it without"
        )
    return routed.spread


def planned_batches(
    routed: RoutedTransformer, spread: ExpertParallelModel, micro_batches: Sequence[TraceRows | RoutingTrace]
) -> list[MicroBatch]:
    """The micro-batches of this rank, as plans know them. A collective call.

    Raises:
        TraceError: on every rank alike, when one is no trace of the model.
    """

    def look() -> list[MicroBatch]:
        given = micro_batches if isinstance(micro_batches, Sequence) else [micro_batches]
        found = [each if isinstance(each, TraceRows) else routed.rows(each) for each in given]
        part, num_parts = spread.layers[0].slices
        return [
            MicroBatch(
                each.trace,
                each.counts_of(part, num_parts),
                each.is_whole,
                int(each.trace.valid_N.sum()),
                is_shared=num_parts > 1,
            )
            for each in found
        ]

    return found_alike(spread.ranks.everyone, TraceError, "looking at micro-batches", look)


def planned_counts(
    spread: ExpertParallelModel,
    plan: StepPlan | None,
    planned: NDArray[np.integer] | RoutingTrace | Sequence[RoutingTrace],
) -> tuple[StepPlan, NDArray[np.integer]]:
    """A plan and its counts, integers [M, L, G, E], of traces by its packing. A collective call.

    Raises:
        PlanError: on every rank alike, when there is no plan, it is for other traces, or it has replicas of experts
            that can have none.
    """

    def look() -> tuple[StepPlan, NDArray[np.integer]]:
        if plan is None:
            if not isinstance(planned, np.ndarray):
                raise PlanError(
                    f"what is to be executed is given as {shown(planned)}; without a plan, whose packing counts "
                    "traces, expected what gather_counts() gives"
                )
            return plan_at_home(planned, spread.home_LE), planned
        if not isinstance(plan, StepPlan):
            raise PlanError(f"the plan is {shown(plan)}; expected what plan() or load_plan() gives, or None")
        objections = (layer.objection_to_replicas() for layer in spread.layers)
        if plan.num_replicas_ML.any() and (why := next(filter(None, objections), None)):
            raise PlanError(f"the plan has replicas, and {why}; plan with no redundant slots, or execute None")
        if isinstance(planned, np.ndarray):
            return plan, planned
        traces = [planned] if isinstance(planned, RoutingTrace) else planned
        if not (isinstance(traces, Sequence) and all(isinstance(trace, RoutingTrace) for trace in traces)):
            raise PlanError(f"what was planned is given as {shown(planned)}; expected counts or traces")
        return plan, plan.counts_of(traces)

    return found_alike(spread.ranks.everyone, PlanError, "looking at the plan", look)


def plan_at_home(counts_MLGE: NDArray[np.integer], home_LE: NDArray[np.int16]) -> StepPlan:
    """The plan in which every expert serves at its home, of which nothing is priced.

    Raises:
        PlanError: when counts are not those of these layers and experts.
    """
    if counts_MLGE.ndim != 4 or counts_MLGE.shape[1::2] != home_LE.shape or counts_MLGE.dtype.kind not in "iu":
        raise PlanError(
            f"counts are {counts_MLGE.dtype} {list(counts_MLGE.shape)}; expected integers [micro-steps, "
            f"{home_LE.shape[0]}, ranks, {home_LE.shape[1]}] of gather_counts()"
        )
    num_micro_steps, _, num_ranks, _ = counts_MLGE.shape
    hosts = Hosts.with_room(home_LE, num_micro_steps, num_ranks, 0)
    counts_MLE = counts_MLGE.sum(axis=2, dtype=np.int64)
    slowest_ML = np.max([(counts_MLE * (home_LE == rank)).sum(axis=2) for rank in range(num_ranks)], axis=0)
    topology = Topology(num_ranks, num_ranks, 0, Links(1.0, 1.0, 1.0, 1.0, 1.0))
    digest = counts_digest(counts_MLGE)
    return StepPlan(topology, home_LE, hosts, slowest_ML, slowest_ML.astype(np.float64), digest, "shared")
