"""One expert-parallel group through recompute and update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from foreroute.costs import links
from foreroute.costs.model import BACKWARD, FORWARD, CostModel
from foreroute.plan.topology import Topology
from foreroute.planner.progress import block_ends
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.cell_costs import Compute, Transfers, compute_of, transfers_of, without_cost
from foreroute.simulate.engine import ExecutionModel, Floats, GroupRun, run
from foreroute.simulate.methods import ServedStep


@dataclass(frozen=True, eq=False)
class EPGroup:
    """What a group is to do, by one method, with all layers of the model.

    Attributes:
        step: the tokens of the group.
        topology: ranks and links.
        costs: the cost model.
        compute: of all cells.
        recompute, update: transfers of the two.
        model: how the cluster executes.
    """

    step: BalancerInput
    topology: Topology
    costs: CostModel
    compute: Compute
    recompute: Transfers
    update: Transfers
    model: ExecutionModel

    @classmethod
    def of(cls, served: ServedStep, step: BalancerInput, costs: CostModel, *, overlap: float) -> EPGroup:
        """Price a served step. Layers that were drawn stand in turn for those of the model.

        Args:
            served: who serves what.
            step: the tokens.
            costs: the cost model; its links take the place of those of the step's topology.
            overlap: of the `ExecutionModel`.
        """
        topology = replace(step.topology, links=costs.hardware.links)
        layers = np.arange(costs.model.num_layers) % step.counts_MLGE.shape[1]
        compute = compute_of(served, step.squares_MG, layers, topology, costs)
        recompute, update = transfers_of(served, layers, topology, costs)
        model = ExecutionModel(overlap, costs.prefetch, served.slots == "layer")
        return cls(step, topology, costs, compute, recompute, update, model)

    def bound(self) -> EPGroup:
        """The same at the least cost that any plan could have.

        The experts' whole work in one piece, spread evenly over all ranks; all-to-alls that take their latency alone;
        free transfers. It is `costs.pricing.least_seconds`, cell by cell.
        """
        loads_MLE = self.step.counts_MLGE.sum(axis=2, dtype=np.int64)
        layers = np.arange(self.compute.all_to_all_ML.shape[1]) % loads_MLE.shape[1]
        experts = [
            self.costs.expert_seconds(loads_MLE, one).sum(axis=2)[:, layers] / self.topology.num_ranks
            for one in (FORWARD, BACKWARD)
        ]
        even_MLG2 = np.broadcast_to(np.stack(experts, -1)[:, :, None], self.compute.experts_MLG2.shape)
        all_to_all_ML = np.full(self.compute.all_to_all_ML.shape, self.costs.prices(self.topology).latency_s)
        return replace(
            self,
            compute=self.compute._replace(all_to_all_ML=all_to_all_ML, experts_MLG2=even_MLG2),
            recompute=without_cost(self.recompute),
            update=without_cost(self.update),
        )

    def run(self, ready_M: Floats | None = None) -> tuple[GroupRun, GroupRun]:
        """Recompute and update.

        Args:
            ready_M: seconds from the start of the recompute when the plan of each micro-step is there.
        """
        return (
            run(self.compute, self.recompute, self.model, stage=0, ready_M=ready_M),
            run(self.compute, self.update, self.model, stage=1),
        )

    def moved_bytes(self) -> dict[str, dict[str, float]]:
        """What a rank sends in recompute and update, on average, by what it is and over which link.

        Fetches from host memory are counted where they arrive.
        """
        model, prices, ranks = self.costs.model, self.costs.prices(self.topology), self.topology.num_ranks
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
