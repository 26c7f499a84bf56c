"""Seconds of work of a served step, for every cell, rank and resource: the engine's input.

Every micro-step goes through the layers once in the recompute, and forward and back in the update, where activations
are computed anew on the way back. Arrays over both ways have the axis K: 0 forward, 1 back. What is found in the slots
on the way back need not be fetched.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.costs import links, pricing
from foreroute.costs.model import BACKWARD, FORWARD, CostModel
from foreroute.plan.hosts import Hosts
from foreroute.plan.options import SlotSharing
from foreroute.plan.topology import Topology
from foreroute.simulate.balancers import BalancerInput

Floats = NDArray[np.float64]


class PassWork(NamedTuple):
    """Work of a group in one pass of a step, in seconds: of its ranks, of the all-to-alls, and of what moves beside.

    Attributes:
        attention_MG2: [M, G, 2], attention and all that is dense in a layer, forward and backward.
        head_MG: [M, G], the output head in a forward pass; backward takes twice as long.
        all_to_all_ML: [M, L], one all-to-all.
        rows_ML2: [M, L, 2], rows that all ranks together send in it, over their links inside nodes and over NICs.
        experts_MLG2: [M, L, G, 2], the experts, forward and backward.
        layer_s: fixed, of one pass over one layer.
        host_KMLG: [2, M, L, G], fetches by the copy engine from host memory, by way.
        direct_KMLG4: [2, M, L, G, 4], fetches over NIC out, NIC in, node link out, node link in, by way.
        gradient_MLG4: [M, L, G, 4], gradients that return over these links after the backward pass.
    """

    attention_MG2: Floats
    head_MG: Floats
    all_to_all_ML: Floats
    rows_ML2: Floats
    experts_MLG2: Floats
    layer_s: float
    host_KMLG: Floats
    direct_KMLG4: Floats
    gradient_MLG4: Floats

    def forward_alone(self) -> PassWork:
        """The same without a way back: nothing is fetched on it, and no gradient returns."""
        is_forth = np.array([1.0, 0.0])
        return self._replace(
            host_KMLG=self.host_KMLG * is_forth[:, None, None, None],
            direct_KMLG4=self.direct_KMLG4 * is_forth[:, None, None, None, None],
            gradient_MLG4=np.zeros_like(self.gradient_MLG4),
        )

    def without_transfers(self) -> PassWork:
        """The same where weights and gradients move at no cost."""
        free = {name: np.zeros_like(getattr(self, name)) for name in ("host_KMLG", "direct_KMLG4", "gradient_MLG4")}
        return self._replace(**free)


def pass_work(
    hosts: Hosts,
    slots: SlotSharing,
    step: BalancerInput,
    layers: NDArray[np.integer],
    topology: Topology,
    costs: CostModel,
) -> PassWork:
    """Price a pass that goes forward and back; `layers` are the planned ones that stand for those of the model.

    Slots of a layer hold what the plan left there, so that the way back fetches nothing. Slots that layers share hold
    the last `prefetch` + 1 cells, which the way back begins with. Without squares of lengths, sequences are those of
    `costs.sequence_tokens`.
    """
    shape, prices, ranks = step.counts_MLGE.shape[:2], costs.prices(topology), topology.num_ranks
    all_to_all_ML, rows_ML2, experts_MLG2 = np.empty(shape), np.empty((*shape, 2)), np.empty((*shape, ranks, 2))
    fetch_MLG5, gradient_MLG5 = np.zeros((2, *shape, ranks, 5))
    for place in np.ndindex(shape):
        cell, counts_GE = hosts.cell(*place), step.counts_MLGE[place]
        rows_G4 = links.rows_sent(links.pairs_between(cell, counts_GE), prices)
        all_to_all_ML[place] = links.all_to_all_seconds(rows_G4, prices)
        rows_ML2[place] = rows_G4[:, [links.NODE_OUT, links.CLUSTER_OUT]].sum(axis=0)
        experts_MLG2[place] = np.stack(pricing.experts_by_rank(cell, counts_GE, prices), axis=-1)
        # shared slots keep nothing, whatever was planned
        fetched_R = cell.fetched_R if slots == "layer" else np.ones(len(cell.rank_R), np.bool_)
        fetch_MLG5[place], gradient_MLG5[place] = links.transfer_seconds(
            cell.expert_R, cell.rank_R, fetched_R, cell.home_E, ranks, prices
        )
    # the same tokens pass all layers
    tokens_MG = step.counts_MLGE[:, 0].sum(axis=-1) / costs.model.top_k
    attention_MG2 = np.stack(
        [costs.attention_seconds(tokens_MG, step.squares_MG, one) for one in (FORWARD, BACKWARD)], -1
    )
    fetch_KMLG5 = np.stack([fetch_MLG5[:, layers]] * 2)
    # what the slots still hold when the way turns back is there
    fetched_back = max(len(layers) - costs.prefetch - 1, 0) if slots == "shared" else 0
    fetch_KMLG5[1, :, fetched_back:] = 0
    return PassWork(
        attention_MG2=attention_MG2,
        head_MG=costs.head_seconds(tokens_MG),
        all_to_all_ML=all_to_all_ML[:, layers],
        rows_ML2=rows_ML2[:, layers],
        experts_MLG2=experts_MLG2[:, layers],
        layer_s=prices.layer_s,
        host_KMLG=fetch_KMLG5[..., links.HOST],
        direct_KMLG4=fetch_KMLG5[..., : links.HOST],
        gradient_MLG4=gradient_MLG5[:, layers][..., : links.HOST],
    )
