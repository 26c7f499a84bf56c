"""One expert-parallel group through recompute and update: seconds of its work, and the run of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foreroute.costs import links, pricing
from foreroute.costs.model import BACKWARD, FORWARD, CostModel
from foreroute.plan.hosts import Hosts
from foreroute.plan.options import SlotSharing
from foreroute.plan.topology import Topology
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.engine import ExecutionModel, GroupRun, PassWork, run
from foreroute.simulate.methods import ServedStep


@dataclass(frozen=True, eq=False)
class EPGroup:
    """Work of a group under one method, with all layers of the model."""

    step: BalancerInput
    topology: Topology
    costs: CostModel
    recompute: PassWork
    update: PassWork
    model: ExecutionModel

    @classmethod
    def of(cls, served: ServedStep, step: BalancerInput, costs: CostModel, *, overlap: float) -> EPGroup:
        """Price a served step, which may have other counts of the same tokens, by the links of `costs`."""
        topology = replace(step.topology, links=costs.hardware.links)
        counted = replace(step, counts_MLGE=served.counts_MLGE, squares_MG=served.squares_MG)
        # layers that were drawn stand in turn for those of the model
        layers = np.arange(costs.model.num_layers) % step.counts_MLGE.shape[1]
        # most methods serve both passes alike
        by_hosts = {
            id(hosts): pass_work(hosts, served.slots, counted, layers, topology, costs) for hosts in served.passes
        }
        recompute, update = (by_hosts[id(hosts)] for hosts in served.passes)
        model = ExecutionModel(overlap, costs.prefetch, served.slots == "layer")
        return cls(step, topology, costs, recompute.forward_alone(), update, model)

    def bound(self) -> EPGroup:
        """The same at the least cost that any plan could have: `costs.pricing.least_seconds`, cell by cell."""
        # the experts' whole work in one piece, spread evenly; all-to-alls of their latency alone; free transfers
        experts_ML2 = pricing.least_expert_seconds(self.step.counts_MLGE, self.costs)
        layers = np.arange(self.update.all_to_all_ML.shape[1]) % experts_ML2.shape[1]
        even_MLG2 = np.broadcast_to(experts_ML2[:, layers, None], self.update.experts_MLG2.shape)
        all_to_all_ML = np.full(self.update.all_to_all_ML.shape, self.costs.prices(self.topology).latency_s)
        least = self.update.without_transfers()._replace(all_to_all_ML=all_to_all_ML, experts_MLG2=even_MLG2)
        return replace(self, recompute=least, update=least)

    def run(self, ready_s: float = 0.0) -> tuple[GroupRun, GroupRun]:
        """Run recompute and update; the plan is there `ready_s` seconds after the start of the recompute."""
        return (
            run(self.recompute, self.model, pass_index=0, ready_s=ready_s),
            run(self.update, self.model, pass_index=1),
        )

    def moved_bytes(self) -> dict[str, dict[str, float]]:
        """Bytes that a rank sends in both passes, on average, by what and link; from host memory where they arrive."""
        model, prices, ranks = self.costs.model, self.costs.prices(self.topology), self.topology.num_ranks
        # the update goes forward, forward anew and backward; a dispatch and a combine each
        rows_2 = 2 * self.recompute.rows_ML2.sum(axis=(0, 1)) + 6 * self.update.rows_ML2.sum(axis=(0, 1))
        node, cluster = rows_2 * model.row_bytes / ranks
        of_expert = model.expert_bytes / ranks
        # seconds over the seconds of one give how many there are
        moves = (self.recompute, self.update)
        host_s = sum(float(each.host_KMLG.sum()) for each in moves)
        direct_4 = sum(each.direct_KMLG4.sum(axis=(0, 1, 2, 3)) for each in moves)
        # the recompute has no gradients
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


def pass_work(
    hosts: Hosts,
    slots: SlotSharing,
    step: BalancerInput,
    layers: NDArray[np.integer],
    topology: Topology,
    costs: CostModel,
) -> PassWork:
    """Price a pass that goes forward and back; `layers` are the planned ones that stand for those of the model."""
    # shared slots keep nothing, whatever was planned
    fetched = hosts if slots == "layer" else hosts._replace(fetched_R=np.ones_like(hosts.fetched_R))
    prices = costs.prices(topology)
    work = pricing.work_of_cells(fetched, step.counts_MLGE, prices)
    # the same tokens pass all layers
    tokens_MG = step.counts_MLGE[:, 0].sum(axis=-1) / costs.model.top_k
    attention_MG2 = np.stack(
        [costs.attention_seconds(tokens_MG, step.squares_MG, one) for one in (FORWARD, BACKWARD)], -1
    )
    fetch_KMLG5 = np.stack([work.fetch_MLG5[:, layers]] * 2)
    # Slots of a layer hold what the plan left there, so the way back fetches nothing. Slots that layers share hold the
    # last `prefetch` + 1 cells, which the way back begins with.
    fetched_back = max(len(layers) - costs.prefetch - 1, 0) if slots == "shared" else 0
    fetch_KMLG5[1, :, fetched_back:] = 0
    return PassWork(
        attention_MG2=attention_MG2,
        head_MG=costs.head_seconds(tokens_MG),
        all_to_all_ML=work.all_to_all_ML[:, layers],
        rows_ML2=work.rows_MLG4[:, layers][..., [links.NODE_OUT, links.CLUSTER_OUT]].sum(axis=2),
        experts_MLG2=work.experts_MLG2[:, layers],
        layer_s=prices.layer_s,
        host_KMLG=fetch_KMLG5[..., links.HOST],
        direct_KMLG4=fetch_KMLG5[..., : links.HOST],
        gradient_MLG4=work.gradient_MLG5[:, layers][..., : links.HOST],
    )
