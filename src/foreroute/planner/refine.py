"""What follows the search for replicas, by the cost model: replicas against traffic, then pruning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.links import HOST, NODE_OUT, pairs_between, rows_sent, transfer_seconds
from foreroute.costs.model import CostModel, Prices
from foreroute.costs.pricing import EXPOSED, cell_seconds, price_cell, slowest_attention
from foreroute.kernels import kernel
from foreroute.plan.hosts import CellPlan, Hosts
from foreroute.plan.options import PlanOptions
from foreroute.plan.step_plan import CellHosts
from foreroute.plan.topology import Topology
from foreroute.planner.levels import LEVELS, exposed_planning
from foreroute.planner.traffic import replicate_for_traffic

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Refiner:
    """Refines cells as they are planned. The micro-steps of a layer must come in order."""

    def __init__(
        self,
        counts_MLGE: NDArray[np.int32],
        topology: Topology,
        options: PlanOptions,
        settled: PlanOptions,
        costs: CostModel,
    ) -> None:
        """Of one step, with the options as they were given and as `levels_by_price` settled them.

        Layers may come from several threads.
        """
        self._counts_MLGE, self._topology, self._costs = counts_MLGE, topology, costs
        self._open = [level for level in LEVELS if getattr(options, level) is None and getattr(settled, level)]
        self._options_L = [settled] * counts_MLGE.shape[1]
        slots = (counts_MLGE.shape[1], topology.num_ranks, topology.redundant_slots)
        self._held_LGS = np.full(slots, -1, np.int16)

    def refine(self, hosts: Hosts, max_load_ML: NDArray[np.int64], place: tuple[int, int, int, int]) -> Hosts:
        """Give cells other replicas where that is faster; `place` as of `plan_block`, loads are brought up to date."""
        begin, end, first_layer, end_layer = place
        if begin == 0 and self._open and self._costs.refine_s:
            for layer in range(first_layer, end_layer):
                self._settle(layer, hosts.cell(0, layer - first_layer))
        cells = []
        for m in range(begin, end):
            for layer in range(first_layer, end_layer):
                before = hosts.cell(m - begin, layer - first_layer)
                counts_GE = self._counts_MLGE[m, layer]
                cell = self._refined(before, counts_GE, self._held_LGS[layer], self._options_L[layer])
                if cell is not before:
                    max_load_ML[m - begin, layer - first_layer] = cell.loads_G(counts_GE).max()
                cells.append(cell)
        return Hosts.of_cells(hosts.home_LE, cells)

    def levels(self) -> dict[str, str]:
        """Why a level that was left open is not on in all layers; nothing where it is."""
        num_off = [sum(not getattr(options, level) for options in self._options_L) for level in self._open]
        return {
            level: f"{'off' if off == len(self._options_L) else 'on'}: in {off} of {len(self._options_L)} layers, "
            "planning it would expose more time than it saves"
            for level, off in zip(self._open, num_off, strict=True)
            if off
        }

    def _settle(self, layer: int, cell: CellPlan) -> None:
        """Leave the open levels on in a layer if what they save in its first cell, in all of them, is more than
        planning them exposes.
        """
        counts_GE, topology, costs = self._counts_MLGE[0, layer], self._topology, self._costs
        num_micro_steps, on = len(self._counts_MLGE), self._options_L[layer]
        closed: dict[str, Any] = dict.fromkeys(self._open, False)
        off = replace(on, **closed)
        nothing_held_GS = np.full_like(self._held_LGS[layer], -1)
        priced = [
            price_cell(found, counts_GE, topology, costs)
            for options in (off, on)
            for found in [self._refined(cell, counts_GE, nothing_held_GS.copy(), options)]
        ]
        without_s, with_s = (figures.seconds for figures in priced)
        exposed_s = exposed_planning(num_micro_steps, costs.refine_s, float(priced[0].parts_SP[0].sum()))
        if num_micro_steps * (without_s - with_s) <= exposed_s:
            self._options_L[layer] = off

    def _refined(
        self, cell: CellPlan, counts_GE: NDArray[np.int32], held_GS: NDArray[np.int16], options: PlanOptions
    ) -> CellPlan:
        if options.traffic:
            cell = replicate_for_traffic(cell, counts_GE, self._topology, self._costs, tolerance=options.tolerance)
        if not options.pay_off:
            return cell
        if options.slots == "layer":
            # What was declined in an earlier micro-step is not in its slot, whatever the cell level planned.
            cell = cell._replace(fetched_R=held_GS[cell.rank_R, cell.slot_R] != cell.expert_R)
        cell = prune_replicas(cell, counts_GE, self._topology, self._costs)
        held_GS[cell.rank_R, cell.slot_R] = cell.expert_R
        return cell


def prune_replicas(
    cell: CellPlan,
    counts_GE: NDArray[np.integer],
    topology: Topology,
    costs: CostModel,
) -> CellPlan:
    """Drop replicas of one cell while their transfers expose time.

    One after another goes the replica that serves least of those whose transfer is on the busiest link; another host
    of its expert takes over. The fastest plan of this series, by the cost model, is the answer.

    Args:
        cell: of the plan.
        counts_GE: integers [G, E], of the cell.
        topology: ranks and links.
        costs: the cost model.

    Returns:
        A plan that takes less time, or `cell` itself.
    """
    counts = np.ascontiguousarray(counts_GE, np.int64)
    hosts = CellHosts.of(cell, counts)
    dropped, takers = _unpaid(
        hosts.expert_H.astype(np.int64),
        hosts.rank_H.astype(np.int64),
        np.array(hosts.tokens_HG, np.int64, order="C"),  # one kind of array: compiled once
        hosts.fetched_H.copy(),
        cell.home_E.astype(np.int64),
        slowest_attention(counts.sum(axis=1), costs),
        costs.prices(topology),
    )
    if not len(dropped):
        return cell
    tokens_HG = hosts.tokens_HG
    for host, taker in zip(dropped, takers, strict=True):
        tokens_HG[taker] += tokens_HG[host]
    keep_R = np.ones(len(cell.expert_R), np.bool_)
    keep_R[dropped - len(cell.home_E)] = False
    return CellPlan(
        cell.home_E,
        cell.expert_R[keep_R],
        cell.rank_R[keep_R],
        cell.slot_R[keep_R],
        cell.fetched_R[keep_R],
        tokens_HG[len(cell.home_E) :][keep_R].astype(np.int32),
    )


# Sums and largest values are loops here: numpy's take numba seconds to compile, each.
@kernel
def _unpaid(
    expert_H: Ints,
    rank_H: Ints,
    tokens_HG: Ints,
    alive_H: Bools,
    home_E: Ints,
    attention_s: NDArray[np.float64],
    prices: Prices,
) -> tuple[Ints, Ints]:
    """The replicas to drop, one after the other, and the host that takes over from each: both int64.

    `alive_H` are the replicas that are fetched; it and `tokens_HG` are changed.
    """
    num_hosts, num_ranks = tokens_HG.shape
    dropped, takers = np.empty(num_hosts, np.int64), np.empty(num_hosts, np.int64)
    gone_H, tokens_H = np.zeros(num_hosts, np.bool_), np.zeros(num_hosts, np.int64)
    for h in range(num_hosts):
        for g in range(num_ranks):
            tokens_H[h] += tokens_HG[h, g]
    # Invariant: every token is served by hosts that are not gone. One replica goes in each round, so there are at most
    # as many rounds as replicas; the first `best` of them led to the fastest state met, the plan as it came included.
    best_s, best, count = np.inf, 0, 0
    while True:
        rows_G4 = rows_sent(pairs_between(rank_H, tokens_HG), prices)
        parts_SP = cell_seconds(rows_G4, expert_H, rank_H, tokens_H, alive_H, home_E, attention_s, prices)
        seconds = 0.0
        for stage in range(len(parts_SP)):
            for part in range(parts_SP.shape[1]):
                seconds += parts_SP[stage, part]
        if seconds < best_s:
            best_s, best = seconds, count
        if parts_SP[0, EXPOSED] + parts_SP[1, EXPOSED] == 0:
            break
        host = _least_on_busiest(expert_H, rank_H, tokens_H, alive_H, home_E, parts_SP, num_ranks, prices)
        if host < 0:
            break
        taker = _successor(host, expert_H, rank_H, tokens_H, gone_H, num_ranks)
        for g in range(num_ranks):
            tokens_HG[taker, g] += tokens_HG[host, g]
            tokens_HG[host, g] = 0
        tokens_H[taker] += tokens_H[host]
        tokens_H[host], gone_H[host], alive_H[host] = 0, True, False
        dropped[count], takers[count] = host, taker
        count += 1
    return dropped[:best], takers[:best]


@kernel
def _least_on_busiest(
    expert_H: Ints,
    rank_H: Ints,
    tokens_H: Ints,
    alive_H: Bools,
    home_E: Ints,
    parts_SP: NDArray[np.float64],
    num_ranks: int,
    prices: Prices,
) -> int:
    """Of the fetched replicas on the busiest copy engine, or on the busiest link where that is not what is exposed, the
    one with the fewest tokens; -1 when there is none.
    """
    fetch_G5, gradient_G5 = transfer_seconds(expert_H, rank_H, alive_H, home_E, num_ranks, prices)
    engine, rank, link, link_s = 0, 0, 0, 0.0
    for g in range(num_ranks):
        if fetch_G5[g, HOST] > fetch_G5[engine, HOST]:
            engine = g
        for one in range(HOST):
            its_s = gradient_G5[g, one] + 2 * fetch_G5[g, one]  # the update fetches twice
            if its_s > link_s:
                rank, link, link_s = g, one, its_s
    # Copies of the recompute hide behind its other work. Where they are longer than that, engines are what is exposed.
    work_s = 0.0
    for part in range(parts_SP.shape[1]):
        work_s += parts_SP[0, part]
    by_engine = fetch_G5[engine, HOST] > work_s - parts_SP[0, EXPOSED] or link_s == 0
    best, fewest = -1, 0
    for h in range(len(rank_H)):
        if not alive_H[h]:
            continue
        home = home_E[expert_H[h]]
        if by_engine:
            involved = rank_H[h] == engine and rank_H[h] // prices.host_ranks == home // prices.host_ranks
        else:
            same_node = rank_H[h] // prices.ranks_per_node == home // prices.ranks_per_node
            involved = (rank_H[h] == rank or home == rank) and same_node == (link >= NODE_OUT)
        if involved and (best < 0 or tokens_H[h] < fewest):
            best, fewest = h, tokens_H[h]
    return best


@kernel
def _successor(host: int, expert_H: Ints, rank_H: Ints, tokens_H: Ints, gone_H: Bools, num_ranks: int) -> int:
    """Another host of the same expert, on the rank that serves least."""
    load_G = np.zeros(num_ranks, np.int64)
    for h in range(len(rank_H)):
        load_G[rank_H[h]] += tokens_H[h]
    best = -1
    for h in range(len(rank_H)):
        serves_it = h != host and expert_H[h] == expert_H[host] and not gone_H[h]
        if serves_it and (best < 0 or load_G[rank_H[h]] < load_G[rank_H[best]]):
            best = h
    return best
