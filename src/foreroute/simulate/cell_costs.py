"""What a method makes of a step, as seconds of work: for every cell, rank and resource. The engine's input.

A *stage pass* takes one micro-step through the layers of a pipeline stage: forward, or backward with the activations
computed anew. Every micro-step makes one of each kind in the update, and a forward one in the recompute. Arrays over
both have the axis K: 0 forward, 1 backward. What a pass finds in the slots, it need not fetch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.costs import pricing
from foreroute.costs.model import BACKWARD, FORWARD, CostModel, Prices
from foreroute.plan.options import SlotUse
from foreroute.plan.step_plan import CellHosts
from foreroute.plan.topology import Topology

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
TransferPath = Literal["host", "direct", "auto"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Compute:
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Transfers:
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


@dataclass(frozen=True, eq=False)
class Hosts:
    """Who serves what in all cells of a step, without tokens.

    Attributes:
        shape: M and L.
        num_ranks: G.
        home_LE: int64 [L, E], where gradients go. A rank always has the weights of its homes.
        offsets: int64 [M * L + 1].
        expert_H, rank_H, fetched_H: of all cells, as in `CellHosts`.
        slots: whose the slots are. Those of a layer keep what they hold.
    """

    shape: tuple[int, int]
    num_ranks: int
    home_LE: Ints
    offsets: Ints
    expert_H: Ints
    rank_H: Ints
    fetched_H: NDArray[np.bool_]
    slots: SlotUse

    @classmethod
    def of(
        cls, assignments: Sequence[CellHosts], shape: tuple[int, int], home_LE: NDArray[np.integer], slots: SlotUse
    ) -> Hosts:
        """From the assignments of all cells, in the order of execution."""
        sizes = [len(one.expert_H) for one in assignments]
        return cls(
            shape,
            assignments[0].tokens_HG.shape[1],
            np.ascontiguousarray(home_LE, np.int64),
            np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            np.concatenate([one.expert_H for one in assignments]).astype(np.int64),
            np.concatenate([one.rank_H for one in assignments]).astype(np.int64),
            np.concatenate([one.fetched_H for one in assignments]),
            slots,
        )

    def away(self, micro_step: int, layer: int, *, fetched: bool = False) -> tuple[Ints, Ints]:
        """Expert and rank of the hosts of a cell that are no homes; on request those that the plan fetches alone."""
        c = micro_step * self.shape[1] + layer
        part = slice(int(self.offsets[c]), int(self.offsets[c + 1]))
        expert_H, rank_H = self.expert_H[part], self.rank_H[part]
        chosen_H = self.home_LE[layer, expert_H] != rank_H
        if fetched:
            chosen_H &= self.fetched_H[part]
        return expert_H[chosen_H], rank_H[chosen_H]


def compute_of(
    assignments: Sequence[CellHosts],
    shape: tuple[int, int],
    squares_MG: NDArray[np.integer] | None,
    topology: Topology,
    costs: CostModel,
) -> Compute:
    """Price all cells.

    Args:
        assignments: of all cells, in the order of execution.
        shape: M and L.
        squares_MG: [M, G], sum of squared lengths of the sequences on each rank; by default those of
            `costs.sequence_tokens`.
        topology: ranks and links.
        costs: the cost model.
    """
    num_micro_steps, num_layers = shape
    prices, ranks = costs.prices(topology), topology.num_ranks
    all_to_all_ML, experts_MLG2 = np.empty(shape), np.empty((*shape, ranks, 2))
    tokens_MG = np.empty((num_micro_steps, ranks))
    for cell, one in enumerate(assignments):
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
    hosts: Hosts,
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
        hosts: of all cells.
        layers: which layer of `hosts` stands for each layer of the pipeline stage.
        order: of stage passes.
        path: of weights. "host": every node's host memory holds all experts. "direct": from the home rank. "auto": host
            memory where the home is in the same node, else direct.
        topology: ranks and links.
        costs: the cost model.
        prefetch: cells that are fetched ahead; slots that layers share are there once more than so often.
        every_micro_step: whether a replica returns its gradients in each micro-step, or once for each fetch.
    """
    prices, ranks = costs.prices(topology), topology.num_ranks
    num_micro_steps, num_layers = hosts.shape
    shape = (2, num_micro_steps, num_layers, ranks)
    host_KMLG, direct_KMLG4 = np.zeros(shape), np.zeros((*shape, 4))
    gradient_MLG4 = np.zeros((*shape[1:], 4))
    for stage_pass, layer, expert_H, rank_H in fetched_hosts(hosts, order):
        home_E = hosts.home_LE[layer]
        near_H = _near(expert_H, rank_H, home_E, path, topology)
        place = (int(stage_pass.backward), stage_pass.micro_step, layer)
        host_KMLG[place] = pricing.transfer_seconds(expert_H, rank_H, near_H, home_E, ranks, prices)[0]
        direct_KMLG4[place] = pricing.transfer_seconds(expert_H, rank_H, ~near_H, home_E, ranks, prices)[1]
    if any(stage_pass.backward for stage_pass in order):
        for m, layer in np.ndindex(num_micro_steps, num_layers):
            away = hosts.away(m, layer, fetched=not every_micro_step)
            gradient_MLG4[m, layer] = _gradients(*away, hosts, layer, prices)
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
    return replace(
        transfers,
        host_KMLG=np.zeros_like(transfers.host_KMLG),
        direct_KMLG4=np.zeros_like(transfers.direct_KMLG4),
        gradient_MLG4=np.zeros_like(transfers.gradient_MLG4),
    )


def fetched_hosts(hosts: Hosts, order: Sequence[StagePass]) -> Iterator[tuple[StagePass, int, Ints, Ints]]:
    """Go through everything that is fetched, cell by cell: stage pass, layer, experts and ranks.

    Slots of a layer hold what the plan left there as long as micro-steps come in the order in which it was made. Where
    a pipeline schedule goes back to an earlier micro-step, they hold what the last pass served. Slots that
    layers share hold nothing; `turns_back` says of which cells that is not so.
    """
    last: StagePass | None = None
    for stage_pass in order:
        in_order = last is None or (not stage_pass.backward and stage_pass.micro_step == last.micro_step + 1)
        for layer in range(hosts.shape[1]):
            if hosts.slots == "layer" and turns_back(stage_pass, last):
                continue
            if hosts.slots == "shared":
                found = hosts.away(stage_pass.micro_step, layer)
            elif in_order:
                found = hosts.away(stage_pass.micro_step, layer, fetched=True)
            else:
                assert last is not None, "the first stage pass is in order"
                found = _missing(hosts.away(stage_pass.micro_step, layer), hosts.away(last.micro_step, layer), hosts)
            if len(found[0]):
                yield stage_pass, layer, *found
        last = stage_pass


def turns_back(stage_pass: StagePass, last: StagePass | None) -> bool:
    """Whether a backward pass follows its own forward pass, and so finds the last cells of that in place."""
    return stage_pass.backward and last == StagePass(False, stage_pass.micro_step)


def _missing(wanted: tuple[Ints, Ints], held: tuple[Ints, Ints], hosts: Hosts) -> tuple[Ints, Ints]:
    """The wanted hosts, as expert and rank, that are not held."""
    keys = [expert_H * hosts.num_ranks + rank_H for expert_H, rank_H in (wanted, held)]
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


def _gradients(
    expert_H: NDArray[np.int64], rank_H: NDArray[np.int64], hosts: Hosts, layer: int, prices: Prices
) -> Floats:
    """float64 [G, 4]."""
    everything = np.ones(len(expert_H), np.bool_)
    gradient_G4: Floats = pricing.transfer_seconds(
        expert_H, rank_H, everything, hosts.home_LE[layer], hosts.num_ranks, prices
    )[2]
    return gradient_G4
