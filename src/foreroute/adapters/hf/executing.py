"""What plans need of a Hugging Face model: what it is spread as, its micro-batches, and the counts of traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import nn

from foreroute.adapters.hf.batch_routes import TraceRows
from foreroute.adapters.hf.distributing import PLACED
from foreroute.ep import ExpertParallelModel
from foreroute.ep.agreement import found_alike
from foreroute.ep.execution_ranks import MicroBatch
from foreroute.errors import AttachError, PlanError, TraceError, shown
from foreroute.plan import StepPlan
from foreroute.trace import RoutingTrace

if TYPE_CHECKING:
    from foreroute.adapters.hf.model import RoutedTransformer


def placed_of(model: nn.Module) -> ExpertParallelModel:
    """What the experts of a model are spread as.

    Raises:
        AttachError: when they are not.
    """
    placed: ExpertParallelModel | None = model.__dict__.get(PLACED)
    if placed is None:
        raise AttachError(
            f"the experts of this {type(model).__name__} are all on one rank; spread them by "
            "foreroute.adapters.hf.distribute(model), or load it by distribute_pretrained, and attach to placed.model"
        )
    return placed


def planned_batches(
    routed: RoutedTransformer, placed: ExpertParallelModel, micro_batches: Sequence[TraceRows | RoutingTrace]
) -> list[MicroBatch]:
    """The micro-batches of this rank, as plans know them. A collective call.

    Raises:
        TraceError: on every rank alike, when one is no trace of the model.
    """

    def look() -> list[MicroBatch]:
        given = micro_batches if isinstance(micro_batches, Sequence) else [micro_batches]
        found = [each if isinstance(each, TraceRows) else routed.rows(each) for each in given]
        return [MicroBatch(each.trace, each.counts_LE, each.is_whole) for each in found]

    return found_alike(placed.consensus, TraceError, "looking at micro-batches", look)


def planned_counts(
    placed: ExpertParallelModel, plan: StepPlan, planned: NDArray[np.integer] | RoutingTrace | Sequence[RoutingTrace]
) -> NDArray[np.integer]:
    """The counts of a plan, integers [M, L, G, E], of traces by its packing. A collective call.

    Raises:
        PlanError: on every rank alike, when there is no plan, or it is for other traces.
    """

    def look() -> NDArray[np.integer]:
        if not isinstance(plan, StepPlan):
            raise PlanError(f"the plan is {shown(plan)}; expected what plan() or load_plan() gives")
        if isinstance(planned, np.ndarray):
            return planned
        traces = [planned] if isinstance(planned, RoutingTrace) else planned
        if not (isinstance(traces, Sequence) and all(isinstance(trace, RoutingTrace) for trace in traces)):
            raise PlanError(f"what was planned is given as {shown(planned)}; expected counts or traces")
        return plan.counts_of(traces)

    return found_alike(placed.consensus, PlanError, "looking at the plan", look)
