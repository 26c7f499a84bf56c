"""What a method makes of a step, as seconds of work: for every cell, rank and resource. The engine's input.

A *stage pass* takes one micro-step through the layers of a pipeline stage: forward, or backward with the activations
computed anew. Every micro-step makes one of each kind in the update, and a forward one in the recompute. Arrays over
both have the axis K: 0 forward, 1 backward. What a pass finds in the slots, it need not fetch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.costs import pricing
from foreroute.costs.model import BACKWARD, FORWARD, CostModel
from foreroute.plan.topology import Topology
from foreroute.simulate.methods import PlannedStep

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
TransferPath = Literal["host", "direct", "auto"]


class Compute(NamedTuple):
    """What the ranks compute and send between each other in each cell; no transfers.

    Attributes:
        attention_MG2: [M, G, 2], seconds of attention and all that is dense in a layer, forward and backward.
        head_MG: [M, G], seconds of the output head in a forward pass; backward takes twice as long.
        all_to_all_ML: [M, L], seconds of one all-to-all.
        experts_MLG2: [M, L, G, 2], seconds of the experts, forward and backward.
        layer_s: fixed, of one pass over one layer.
        send_M: [M], seconds of handing a micro-step to the next pipeline stage.
    """

    attention_MG2: Floats
    head_MG: Floats
    all_to_all_ML: Floats
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
    planned: PlannedStep, squares_MG: NDArray[np.integer] | None, topology: Topology, costs: CostModel
) -> Compute:
    """Price all cells.

    Args:
        planned: who serves what.
        squares_MG: [M, G], sum of squared lengths of the sequences on each rank; by default those of
            `costs.sequence_tokens`.
        topology: ranks and links.
        costs: the cost model.
    """
    shape = num_micro_steps, num_layers = _shape(planned)
    prices, ranks = costs.prices(topology), topology.num_ranks
    all_to_all_ML, experts_MLG2 = np.empty(shape), np.empty((*shape, ranks, 2))
    tokens_MG = np.empty((num_micro_steps, ranks))
    for cell, one in enumerate(planned.assignments):
        m, layer = divmod(cell, num_layers)
        rank_H = one.rank_H.astype(np.int64)
        tokens_HG = np.ascontiguousarray(one.tokens_HG, np.int64)
        pairs_GG = pricing.pairs_between(rank_H, tokens_HG)
        all_to_all_ML[m, layer] = pricing.all_to_all_seconds(pricing.rows_sent(pairs_GG, prices), prices)
        forward_G, backward_G = pricing.experts_by_rank(rank_H, tokens_HG.sum(axis=1), ranks, prices)
        experts_MLG2[m, layer, :, 0], experts_MLG2[m, layer, :, 1] = forward_G, backward_G
        if layer == 0:
            tokens_MG[m] = tokens_HG.sum(axis=0) / costs.model.top_k
    attention_MG2 = np.stack([costs.attention_seconds(tokens_MG, squares_MG, one) for one in (FORWARD, BACKWARD)], -1)
    send_s = tokens_MG.max(axis=1) * prices.cluster_row_s + topology.links.cluster_latency_s
    return Compute(
        attention_MG2=attention_MG2,
        head_MG=costs.head_seconds(tokens_MG),
        all_to_all_ML=all_to_all_ML,
        experts_MLG2=experts_MLG2,
        layer_s=prices.layer_s,
        send_M=send_s,
    )


def transfers_of(
    planned: PlannedStep,
    layers: NDArray[np.integer],
    order: Sequence[StagePass],
    path: TransferPath,
    topology: Topology,
    costs: CostModel,
    *,
    prefetch: int,
    every_micro_step: bool = True,
) -> Transfers:
    """Price what moves when a pipeline stage goes through its cells in this order.

    Args:
        planned: who serves what.
        layers: which planned layer stands for each layer of the pipeline stage.
        order: of stage passes.
        path: of weights. "host": every node's host memory holds all experts. "direct": from the home rank. "auto": host
            memory where the home is in the same node, else direct.
        topology: ranks and links.
        costs: the cost model.
        prefetch: cells that are fetched ahead; slots that layers share are there once more than so often.
        every_micro_step: whether a replica returns its gradients in each micro-step, or once for each fetch.
    """
    prices, ranks = costs.prices(topology), topology.num_ranks
    num_micro_steps, num_layers = _shape(planned)
    shape = (2, num_micro_steps, num_layers, ranks)
    host_KMLG, direct_KMLG4 = np.zeros(shape), np.zeros((*shape, 4))
    gradient_MLG4 = np.zeros((*shape[1:], 4))
    for stage_pass, layer, expert_H, rank_H in fetched_hosts(planned, order):
        home_E = planned.home_LE[layer]
        near_H = _near(expert_H, rank_H, home_E, path, topology)
        place = (int(stage_pass.backward), stage_pass.micro_step, layer)
        host_KMLG[place] = pricing.transfer_seconds(expert_H, rank_H, near_H, home_E, ranks, prices)[0]
        direct_KMLG4[place] = pricing.transfer_seconds(expert_H, rank_H, ~near_H, home_E, ranks, prices)[1]
    if any(stage_pass.backward for stage_pass in order):
        for m, layer in np.ndindex(num_micro_steps, num_layers):
            expert_H, rank_H = _away(planned, m, layer, fetched=not every_micro_step)
            all_H, home_E = np.ones(len(expert_H), np.bool_), planned.home_LE[layer]
            gradient_MLG4[m, layer] = pricing.transfer_seconds(expert_H, rank_H, all_H, home_E, ranks, prices)[2]
    host_KMLG, direct_KMLG4 = host_KMLG[:, :, layers], direct_KMLG4[:, :, layers]
    # Shared slots hold the last prefetch + 1 cells, which a backward pass begins with when it follows its forward pass.
    found = max(len(layers) - prefetch - 1, 0)
    for last, stage_pass in pairwise(order):
        if turns_back(stage_pass, last):
            host_KMLG[1, stage_pass.micro_step, found:] = 0
            direct_KMLG4[1, stage_pass.micro_step, found:] = 0
    return Transfers(host_KMLG=host_KMLG, direct_KMLG4=direct_KMLG4, gradient_MLG4=gradient_MLG4[:, layers])


def without_cost(transfers: Transfers) -> Transfers:
    """Give the same transfers at no cost."""
    return Transfers(*map(np.zeros_like, transfers))


def fetched_hosts(planned: PlannedStep, order: Sequence[StagePass]) -> Iterator[tuple[StagePass, int, Ints, Ints]]:
    """Go through everything that is fetched, cell by cell: stage pass, layer, experts and ranks.

    Slots of a layer hold what the plan left there as long as micro-steps come in the order in which it was made. Where
    a pipeline schedule goes back to an earlier micro-step, they hold what the last pass served. Slots that
    layers share hold nothing; `turns_back` says of which cells that is not so.
    """
    last: StagePass | None = None
    for stage_pass in order:
        in_order = last is None or (not stage_pass.backward and stage_pass.micro_step == last.micro_step + 1)
        for layer in range(len(planned.home_LE)):
            if planned.slots == "layer" and turns_back(stage_pass, last):
                continue
            if planned.slots == "shared":
                found = _away(planned, stage_pass.micro_step, layer)
            elif in_order:
                found = _away(planned, stage_pass.micro_step, layer, fetched=True)
            else:
                assert last is not None, "the first stage pass is in order"
                found = _missing(_away(planned, stage_pass.micro_step, layer), _away(planned, last.micro_step, layer))
            if len(found[0]):
                yield stage_pass, layer, *found
        last = stage_pass


def turns_back(stage_pass: StagePass, last: StagePass | None) -> bool:
    """Whether a backward pass follows its own forward pass, and so finds the last cells of that in place."""
    return stage_pass.backward and last == StagePass(False, stage_pass.micro_step)


def _shape(planned: PlannedStep) -> tuple[int, int]:
    """M and L."""
    num_layers = len(planned.home_LE)
    return len(planned.assignments) // num_layers, num_layers


def _away(planned: PlannedStep, micro_step: int, layer: int, *, fetched: bool = False) -> tuple[Ints, Ints]:
    """Expert and rank of the hosts of a cell that are no homes; on request those that the plan fetches alone.

    A rank always has the weights of its homes.
    """
    one = planned.assignments[micro_step * len(planned.home_LE) + layer]
    chosen_H = planned.home_LE[layer, one.expert_H] != one.rank_H
    if fetched:
        chosen_H &= one.fetched_H
    return one.expert_H[chosen_H].astype(np.int64), one.rank_H[chosen_H].astype(np.int64)


def _missing(wanted: tuple[Ints, Ints], held: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """The wanted hosts, as expert and rank, that are not held."""
    more_than_ranks = 1 + max(int(rank_H.max(initial=0)) for _, rank_H in (wanted, held))
    keys = [expert_H * more_than_ranks + rank_H for expert_H, rank_H in (wanted, held)]
    missing_H = ~np.isin(keys[0], keys[1])
    return wanted[0][missing_H], wanted[1][missing_H]


def _near(
    expert_H: NDArray[np.int64],
    rank_H: NDArray[np.int64],
    home_E: NDArray[np.int64],
    path: TransferPath,
    topology: Topology,
) -> NDArray[np.bool_]:
    if path == "auto":
        near: NDArray[np.bool_] = topology.node_G[rank_H] == topology.node_G[home_E[expert_H]]
        return near
    return np.full(len(expert_H), path == "host")
