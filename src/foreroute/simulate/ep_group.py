"""One expert-parallel group, with all its pipeline stages, through recompute and update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from foreroute.costs import links
from foreroute.costs.model import BACKWARD, FORWARD, CostModel
from foreroute.plan.topology import Topology
from foreroute.planner.progress import block_ends
from foreroute.simulate.cell_costs import (
    Compute,
    StagePass,
    Transfers,
    compute_of,
    transfers_of,
    without_cost,
)
from foreroute.simulate.config import SimulateConfig
from foreroute.simulate.engine import ExecutionModel, Floats, StageRun, run
from foreroute.simulate.methods import ServedStep
from foreroute.simulate.steps import GroupStep


@dataclass(frozen=True, eq=False)
class EPGroup:
    """What a group is to do, by one method, with all layers of the model.

    Attributes:
        compute: of all cells.
        recompute, update: transfers of the two stages.
        model: how the cluster executes.
        layer_ranges: layers of each pipeline stage.
    """

    compute: Compute
    recompute: Transfers
    update: Transfers
    model: ExecutionModel
    layer_ranges: list[range]

    @classmethod
    def of(
        cls, served: ServedStep, step: GroupStep, config: SimulateConfig, topology: Topology, costs: CostModel
    ) -> EPGroup:
        """Price a served step. Layers that were drawn stand in turn for those of the model."""
        num_micro_steps, drawn = step.problem.counts_MLGE.shape[:2]
        layers = np.arange(costs.model.num_layers) % drawn
        compute = compute_of(served, step.squares_MG, topology, costs)
        compute = compute._replace(
            all_to_all_ML=compute.all_to_all_ML[:, layers],
            rows_ML2=compute.rows_ML2[:, layers],
            experts_MLG2=compute.experts_MLG2[:, layers],
        )
        ranges = layer_ranges(len(layers), config.cluster.pipeline)

        def transfers(orders: list[list[StagePass]]) -> Transfers:
            return _joined(
                [
                    transfers_of(served, layers[here.start : here.stop], order, topology, costs)
                    for order, here in zip(orders, ranges, strict=True)
                ]
            )

        recompute, update = (transfers(orders) for orders in _orders(len(ranges), num_micro_steps))
        model = ExecutionModel(config.execution.overlap, costs.prefetch, served.slots == "layer")
        return cls(compute, recompute, update, model, ranges)

    def bound(self, step: GroupStep, topology: Topology, costs: CostModel) -> EPGroup:
        """The same at the least cost that any plan could have.

        The experts' whole work in one piece, spread evenly over all ranks; all-to-alls that take their latency alone;
        free transfers. It is `costs.pricing.least_seconds`, cell by cell.
        """
        loads_MLE = step.problem.counts_MLGE.sum(axis=2, dtype=np.int64)
        layers = np.arange(self.compute.all_to_all_ML.shape[1]) % loads_MLE.shape[1]
        experts = [
            costs.expert_seconds(loads_MLE, one).sum(axis=2)[:, layers] / topology.num_ranks
            for one in (FORWARD, BACKWARD)
        ]
        even_MLG2 = np.broadcast_to(np.stack(experts, -1)[:, :, None], self.compute.experts_MLG2.shape)
        all_to_all_ML = np.full(self.compute.all_to_all_ML.shape, costs.prices(topology).latency_s)
        return replace(
            self,
            compute=self.compute._replace(all_to_all_ML=all_to_all_ML, experts_MLG2=even_MLG2),
            recompute=without_cost(self.recompute),
            update=without_cost(self.update),
        )

    def run(self, ready_M: Floats | None = None) -> tuple[StageRun, StageRun]:
        """Recompute and update.

        Args:
            ready_M: seconds from the start of the recompute when the plan of each micro-step is there.
        """
        recompute, update = _orders(len(self.layer_ranges), len(self.compute.all_to_all_ML))
        parts = self.layer_ranges, self.compute
        first = run(recompute, *parts, self.recompute, self.model, stage=0, ready_M=ready_M)
        return first, run(update, *parts, self.update, self.model, stage=1)

    def moved_bytes(self, topology: Topology, costs: CostModel) -> dict[str, dict[str, float]]:
        """What a rank sends in recompute and update, on average, by what it is and over which link.

        Fetches from host memory are counted where they arrive.
        """
        model, prices, ranks = costs.model, costs.prices(topology), topology.num_ranks * len(self.layer_ranges)
        # recompute, and in the update forward, forward anew and backward; a dispatch and a combine each
        node, cluster = self.compute.rows_ML2.sum(axis=(0, 1)) * 8 * model.row_bytes / ranks
        of_expert = model.expert_bytes / ranks
        host_s = sum(float(each.host_KMLG.sum()) for each in (self.recompute, self.update))
        direct_4 = sum(each.direct_KMLG4.sum(axis=(0, 1, 2, 3)) for each in (self.recompute, self.update))
        gradient_4 = self.update.gradient_MLG4.sum(axis=(0, 1, 2))
        of_gradient = model.expert_parameters * model.gradient_bytes / ranks
        return {
            "rows": {"node": float(node), "cluster": float(cluster)},
            "weights of replicas": {
                "host": host_s / prices.host_fetch_s * of_expert,
                "node": float(direct_4[links.NODE_OUT]) / prices.node_fetch_s * of_expert,
                "cluster": float(direct_4[links.CLUSTER_OUT]) / prices.cluster_fetch_s * of_expert,
            },
            "gradients of replicas": {
                "node": float(gradient_4[links.NODE_OUT]) / prices.node_gradient_s * of_gradient,
                "cluster": float(gradient_4[links.CLUSTER_OUT]) / prices.cluster_gradient_s * of_gradient,
            },
        }


def plan_ready(num_micro_steps: int, planning_s: float, lead_s: float, *, early: bool) -> NDArray[np.float64]:
    """float64 [M], seconds from the start of the recompute until the plan of each micro-step is there.

    Args:
        num_micro_steps: M.
        planning_s: of the whole step; as long for one micro-step as for another.
        lead_s: by which it begins before the recompute.
        early: whether whole blocks of micro-steps are handed over: the first alone, then as many as before them, up to
            the longest block. Otherwise all come when the last is planned.
    """
    ready_M = np.full(num_micro_steps, planning_s)
    for begin, end in pairwise([0, *block_ends(num_micro_steps)] if early else ()):
        ready_M[begin:end] = end / num_micro_steps * planning_s
    return np.maximum(ready_M - lead_s, 0.0)


def _orders(num_stages: int, num_micro_steps: int) -> tuple[list[list[StagePass]], list[list[StagePass]]]:
    """The stage passes of each pipeline stage, in the recompute and in the update."""
    return [forward_only(num_micro_steps)] * num_stages, [
        one_forward_one_backward(p, num_stages, num_micro_steps) for p in range(num_stages)
    ]


def one_forward_one_backward(stage: int, num_stages: int, num_micro_steps: int) -> list[StagePass]:
    """1F1B (PipeDream-Flush, as in Megatron-LM without interleaving).

    A stage goes ahead by as many forward passes as stages follow it, then takes one backward and one forward pass in
    turn, and ends with the backward passes that are left.
    """
    ahead = min(num_stages - 1 - stage, num_micro_steps)
    order = [StagePass(False, m) for m in range(ahead)]
    for m in range(num_micro_steps):
        if m + ahead < num_micro_steps:
            order.append(StagePass(False, m + ahead))
        order.append(StagePass(True, m))
    return order


def forward_only(num_micro_steps: int) -> list[StagePass]:
    """The recompute: every micro-step once."""
    return [StagePass(False, m) for m in range(num_micro_steps)]


def layer_ranges(num_layers: int, num_stages: int) -> list[range]:
    """Which layers each stage has: neighbours, as evenly as possible."""
    bounds = [num_layers * p // num_stages for p in range(num_stages + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


def _joined(parts: Sequence[Transfers]) -> Transfers:
    """Join pipeline stages along the layers: the third axis of what is fetched, the second of gradients."""
    fields = zip(zip(*parts, strict=True), (2, 2, 1), strict=True)
    return Transfers(*(np.concatenate(arrays, axis) for arrays, axis in fields))
