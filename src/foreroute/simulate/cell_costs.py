"""What a method makes of a step, as seconds of work: for every cell, rank and resource. The engine's input.

A *stage pass* takes one micro-step through the layers of a pipeline stage: forward, or backward with the activations
computed anew. Every micro-step makes one of each kind in the update, and a forward one in the recompute. Arrays over
both have the axis K: 0 forward, 1 backward. What a pass finds in the slots, it need not fetch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.costs import links, pricing
from foreroute.costs.model import BACKWARD, FORWARD, CostModel
from foreroute.plan.topology import Topology
from foreroute.simulate.methods import ServedStep

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Compute(NamedTuple):
    """What the ranks compute and send between each other in each cell; no transfers.

    Attributes:
        attention_MG2: [M, G, 2], seconds of attention and all that is dense in a layer, forward and backward.
        head_MG: [M, G], seconds of the output head in a forward pass; backward takes twice as long.
        all_to_all_ML: [M, L], seconds of one all-to-all.
        rows_ML2: [M, L, 2], rows that all ranks together send in it, over their links inside nodes and over NICs.
        experts_MLG2: [M, L, G, 2], seconds of the experts, forward and backward.
        layer_s: fixed, of one pass over one layer.
        send_M: [M], seconds of handing a micro-step to the next pipeline stage.
    """

    attention_MG2: Floats
    head_MG: Floats
    all_to_all_ML: Floats
    rows_ML2: Floats
    experts_MLG2: Floats
    layer_s: float
    send_M: Floats


class Transfers(NamedTuple):
    """Weights and gradients that move in one stage of the step, in seconds of each resource, by kind of stage pass.

    Attributes:
        host_KMLG: [2, M, L, G], of the copy engine from host memory.
        direct_KMLG4: [2, M, L, G, 4], of fetches over NIC out, NIC in, node link out, node link in.
        gradient_MLG4: [M, L, G, 4], of gradients that return after the backward pass.
    """

    host_KMLG: Floats
    direct_KMLG4: Floats
    gradient_MLG4: Floats


class StagePass(NamedTuple):
    """One micro-step through the layers of a pipeline stage."""

    backward: bool
    micro_step: int


def compute_of(
    served: ServedStep, squares_MG: NDArray[np.integer] | None, topology: Topology, costs: CostModel
) -> Compute:
    """Price all cells.

    Args:
        served: who serves what.
        squares_MG: [M, G], sum of squared lengths of the sequences on each rank; by default those of
            `costs.sequence_tokens`.
        topology: ranks and links.
        costs: the cost model.
    """
    shape = num_micro_steps, num_layers = _shape(served)
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
    send_s = tokens_MG.max(axis=1) * prices.cluster_row_s + topology.links.cluster_latency_s
    return Compute(
        attention_MG2=attention_MG2,
        head_MG=costs.head_seconds(tokens_MG),
        all_to_all_ML=all_to_all_ML,
        rows_ML2=rows_ML2,
        experts_MLG2=experts_MLG2,
        layer_s=prices.layer_s,
        send_M=send_s,
    )


def transfers_of(
    served: ServedStep,
    layers: NDArray[np.integer],
    order: Sequence[StagePass],
    topology: Topology,
    costs: CostModel,
) -> Transfers:
    """Price what moves when a pipeline stage goes through its cells in this order.

    Args:
        served: who serves what.
        layers: which planned layer stands for each layer of the pipeline stage.
        order: of stage passes.
        topology: ranks and links.
        costs: the cost model; slots that layers share are there once more than cells are fetched ahead.
    """
    prices, ranks, home_LE = costs.prices(topology), topology.num_ranks, served.home_LE
    num_micro_steps, num_layers = _shape(served)
    shape = (2, num_micro_steps, num_layers, ranks)
    host_KMLG, direct_KMLG4 = np.zeros(shape), np.zeros((*shape, 4))
    gradient_MLG4 = np.zeros((*shape[1:], 4))
    for stage_pass, layer, fetched_R in fetched_replicas(served, order):
        home_E, (expert_R, rank_R, _) = home_LE[layer], _replicas(served, stage_pass.micro_step, layer)
        fetch_G5, _ = links.transfer_seconds(expert_R, rank_R, fetched_R, home_E, ranks, prices)
        place = (int(stage_pass.backward), stage_pass.micro_step, layer)
        host_KMLG[place], direct_KMLG4[place] = fetch_G5[:, links.HOST], fetch_G5[:, : links.HOST]
    if any(stage_pass.backward for stage_pass in order):
        for m, layer in np.ndindex(num_micro_steps, num_layers):
            (expert_R, rank_R, _), home_E = _replicas(served, m, layer), home_LE[layer]
            all_R = np.ones(len(expert_R), np.bool_)
            _, gradient_G5 = links.transfer_seconds(expert_R, rank_R, all_R, home_E, ranks, prices)
            gradient_MLG4[m, layer] = gradient_G5[:, : links.HOST]
    host_KMLG, direct_KMLG4 = host_KMLG[:, :, layers], direct_KMLG4[:, :, layers]
    # Shared slots hold the last prefetch + 1 cells, which a backward pass begins with when it follows its forward pass.
    found = max(len(layers) - costs.prefetch - 1, 0)
    for last, stage_pass in pairwise(order):
        if turns_back(stage_pass, last):
            host_KMLG[1, stage_pass.micro_step, found:] = 0
            direct_KMLG4[1, stage_pass.micro_step, found:] = 0
    return Transfers(host_KMLG=host_KMLG, direct_KMLG4=direct_KMLG4, gradient_MLG4=gradient_MLG4[:, layers])


def without_cost(transfers: Transfers) -> Transfers:
    """Give the same transfers at no cost."""
    return Transfers(*map(np.zeros_like, transfers))


def fetched_replicas(
    served: ServedStep, order: Sequence[StagePass]
) -> Iterator[tuple[StagePass, int, NDArray[np.bool_]]]:
    """Go through everything that is fetched, cell by cell: stage pass, layer, and bool [R] of the cell's replicas.

    Slots of a layer hold what the plan left there as long as micro-steps come in the order in which it was made. Where
    a pipeline schedule goes back to an earlier micro-step, they hold what the last pass served. Slots that
    layers share hold nothing; `turns_back` says of which cells that is not so.
    """
    last: StagePass | None = None
    for stage_pass in order:
        in_order = last is None or (not stage_pass.backward and stage_pass.micro_step == last.micro_step + 1)
        for layer in range(_shape(served)[1]):
            if served.slots == "layer" and turns_back(stage_pass, last):
                continue
            expert_R, rank_R, fetched_R = _replicas(served, stage_pass.micro_step, layer)
            if served.slots == "shared":
                fetched_R = np.ones(len(expert_R), np.bool_)
            elif not in_order:
                assert last is not None, "the first stage pass is in order"
                fetched_R = _missing((expert_R, rank_R), _replicas(served, last.micro_step, layer)[:2])
            if fetched_R.any():
                yield stage_pass, layer, fetched_R
        last = stage_pass


def turns_back(stage_pass: StagePass, last: StagePass | None) -> bool:
    """Whether a backward pass follows its own forward pass, and so finds the last cells of that in place."""
    return stage_pass.backward and last == StagePass(False, stage_pass.micro_step)


def _shape(served: ServedStep) -> tuple[int, int]:
    """M and L."""
    return served.counts_MLGE.shape[0], served.counts_MLGE.shape[1]


def _replicas(served: ServedStep, micro_step: int, layer: int) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """The hosts of a cell that are no homes: expert, rank, and whether the plan fetches them. All are [R]."""
    cell = served.cells[micro_step * _shape(served)[1] + layer]
    away_R = cell.home_E[cell.expert_R] != cell.rank_R
    return cell.expert_R[away_R].astype(np.int64), cell.rank_R[away_R].astype(np.int64), cell.fetched_R[away_R]


def _missing(wanted: tuple[Ints, Ints], held: tuple[Ints, Ints]) -> NDArray[np.bool_]:
    """Which of the wanted replicas, given as expert and rank, are not held."""
    more_than_ranks = 1 + max(int(rank_R.max(initial=0)) for _, rank_R in (wanted, held))
    keys = [expert_R * more_than_ranks + rank_R for expert_R, rank_R in (wanted, held)]
    return ~np.isin(keys[0], keys[1])
