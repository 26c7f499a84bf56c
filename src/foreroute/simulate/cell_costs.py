"""What a method makes of a step, as seconds of work: for every cell, rank and resource. The engine's input.

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
from foreroute.plan.topology import Topology
from foreroute.simulate.methods import ServedStep

Floats = NDArray[np.float64]


class Compute(NamedTuple):
    """What the ranks compute and send between each other in each cell; no transfers.

    Attributes:
        attention_MG2: [M, G, 2], seconds of attention and all that is dense in a layer, forward and backward.
        head_MG: [M, G], seconds of the output head in a forward pass; backward takes twice as long.
        all_to_all_ML: [M, L], seconds of one all-to-all.
        rows_ML2: [M, L, 2], rows that all ranks together send in it, over their links inside nodes and over NICs.
        experts_MLG2: [M, L, G, 2], seconds of the experts, forward and backward.
        layer_s: fixed, of one pass over one layer.
    """

    attention_MG2: Floats
    head_MG: Floats
    all_to_all_ML: Floats
    rows_ML2: Floats
    experts_MLG2: Floats
    layer_s: float


class Transfers(NamedTuple):
    """Weights and gradients that move in recompute or update, in seconds of each resource, by way.

    Attributes:
        host_KMLG: [2, M, L, G], of the copy engine from host memory.
        direct_KMLG4: [2, M, L, G, 4], of fetches over NIC out, NIC in, node link out, node link in.
        gradient_MLG4: [M, L, G, 4], of gradients that return after the backward pass.
    """

    host_KMLG: Floats
    direct_KMLG4: Floats
    gradient_MLG4: Floats


def compute_of(
    served: ServedStep,
    squares_MG: NDArray[np.integer] | None,
    layers: NDArray[np.integer],
    topology: Topology,
    costs: CostModel,
) -> Compute:
    """Price all cells.

    Args:
        served: who serves what.
        squares_MG: [M, G], sum of squared lengths of the sequences on each rank; by default those of
            `costs.sequence_tokens`.
        layers: which planned layer stands for each layer of the model.
        topology: ranks and links.
        costs: the cost model.
    """
    shape = num_micro_steps, num_layers = served.counts_MLGE.shape[:2]
    prices, ranks = costs.prices(topology), topology.num_ranks
    all_to_all_ML, rows_ML2, experts_MLG2 = np.empty(shape), np.empty((*shape, 2)), np.empty((*shape, ranks, 2))
    tokens_MG = np.empty((num_micro_steps, ranks))
    for c, cell in enumerate(served.cells):
        m, layer = divmod(c, num_layers)
        counts_GE = served.counts_MLGE[m, layer]
        rows_G4 = links.rows_sent(links.pairs_between(cell, counts_GE), prices)
        all_to_all_ML[m, layer] = links.all_to_all_seconds(rows_G4, prices)
        rows_ML2[m, layer] = rows_G4[:, [links.NODE_OUT, links.CLUSTER_OUT]].sum(axis=0)
        forward_G, backward_G = pricing.experts_by_rank(cell, counts_GE, prices)
        experts_MLG2[m, layer, :, 0], experts_MLG2[m, layer, :, 1] = forward_G, backward_G
        if layer == 0:
            tokens_MG[m] = counts_GE.sum(axis=1) / costs.model.top_k
    attention_MG2 = np.stack([costs.attention_seconds(tokens_MG, squares_MG, one) for one in (FORWARD, BACKWARD)], -1)
    return Compute(
        attention_MG2=attention_MG2,
        head_MG=costs.head_seconds(tokens_MG),
        all_to_all_ML=all_to_all_ML[:, layers],
        rows_ML2=rows_ML2[:, layers],
        experts_MLG2=experts_MLG2[:, layers],
        layer_s=prices.layer_s,
    )


def transfers_of(
    served: ServedStep, layers: NDArray[np.integer], topology: Topology, costs: CostModel
) -> tuple[Transfers, Transfers]:
    """Price what moves in the recompute and in the update.

    Slots of a layer hold what the plan left there, so that the way back fetches nothing. Slots that layers share hold
    the last `prefetch` + 1 cells, which the way back begins with.

    Args:
        served: who serves what.
        layers: which planned layer stands for each layer of the model.
        topology: ranks and links.
        costs: the cost model.
    """
    prices, ranks = costs.prices(topology), topology.num_ranks
    fetch_MLG5, gradient_MLG5 = np.zeros((2, *served.counts_MLGE.shape[:2], ranks, 5))
    for c, cell in enumerate(served.cells):
        fetched_R = cell.fetched_R if served.slots == "layer" else np.ones(len(cell.rank_R), np.bool_)
        fetch_G5, gradient_G5 = links.transfer_seconds(
            cell.expert_R, cell.rank_R, fetched_R, cell.home_E, ranks, prices
        )
        place = divmod(c, served.counts_MLGE.shape[1])
        fetch_MLG5[place], gradient_MLG5[place] = fetch_G5, gradient_G5
    forth_MLG5 = fetch_MLG5[:, layers]
    back_MLG5 = np.zeros_like(forth_MLG5)
    if served.slots == "shared":
        fetched_back = max(len(layers) - costs.prefetch - 1, 0)
        back_MLG5[:, :fetched_back] = forth_MLG5[:, :fetched_back]

    def moved(fetch_KMLG5: Floats, gradient_MLG4: Floats) -> Transfers:
        return Transfers(fetch_KMLG5[..., links.HOST], fetch_KMLG5[..., : links.HOST], gradient_MLG4)

    gradient_MLG4 = gradient_MLG5[:, layers][..., : links.HOST]
    return (
        moved(np.stack([forth_MLG5, np.zeros_like(forth_MLG5)]), np.zeros_like(gradient_MLG4)),
        moved(np.stack([forth_MLG5, back_MLG5]), gradient_MLG4),
    )


def without_cost(transfers: Transfers) -> Transfers:
    """Give the same transfers at no cost."""
    return Transfers(*map(np.zeros_like, transfers))
