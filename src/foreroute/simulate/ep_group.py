"""One expert-parallel group through recompute and update."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from foreroute.costs import links
from foreroute.costs.model import BACKWARD, FORWARD, CostModel
from foreroute.plan.topology import Topology
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.cell_costs import Compute, Transfers, compute_of, transfers_of, without_cost
from foreroute.simulate.engine import ExecutionModel, GroupRun, run
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

    def run(self, ready_s: float = 0.0) -> tuple[GroupRun, GroupRun]:
        """Recompute and update.

        Args:
            ready_s: seconds from the start of the recompute when the plan is there.
        """
        return (
            run(self.compute, self.recompute, self.model, pass_index=0, ready_s=ready_s),
            run(self.compute, self.update, self.model, pass_index=1),
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
