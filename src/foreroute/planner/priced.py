"""The priced options, traffic and pay-off: in which layers of a step they are on and why, and the cells they change."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.links import pairs_between
from foreroute.costs.model import CostModel
from foreroute.costs.pricing import cell_seconds, slowest_attention
from foreroute.plan.hosts import CellPlan, Hosts
from foreroute.plan.options import PRICED, PlanOptions
from foreroute.plan.topology import Topology
from foreroute.planner.prune import prune_replicas
from foreroute.planner.traffic import most_trials, replicate_for_traffic


class PricedOptions:
    """Changes cells where that saves time. Layers may come from several threads, each layer's micro-steps in order.

    Attributes:
        is_any_on: whether there is anything to do.
    """

    def __init__(
        self, counts_MLGE: NDArray[np.int32], topology: Topology, options: PlanOptions, costs: CostModel | None
    ) -> None:
        """Begin a step. Options that are left open are on until `refine` has looked at the first cell of a layer."""
        self._counts_MLGE, self._topology, self._options, self._costs = counts_MLGE, topology, options, costs
        num_layers, num_ranks = counts_MLGE.shape[1:3]
        self._against = _reasons_against(topology, options, costs)
        on = {name for name in PRICED if self._against[name] is None}
        self._open = {name for name in on if getattr(options, name) is None}
        self._on_L, self.is_any_on = [on] * num_layers, bool(on)
        if costs is not None:
            self._prices = costs.prices(topology)
            self._attention_ML2 = slowest_attention(counts_MLGE, costs)
        self._held_LGS = np.full((num_layers, num_ranks, topology.redundant_slots), -1, np.int16)

    def refine(self, hosts: Hosts, max_load_ML: NDArray[np.int64], place: tuple[int, int, int, int]) -> None:
        """Give cells of a block other replicas where that is faster; `place` as of `plan_block`.

        `hosts` and `max_load_ML` of all micro-steps of these layers are brought up to date.
        """
        begin, end, first_layer, end_layer = place
        if begin == 0 and self._open:
            for layer in range(first_layer, end_layer):
                self._settle(layer, hosts.cell(0, layer - first_layer))
        cells = []
        for m in range(begin, end):
            for layer in range(first_layer, end_layer):
                before, held_GS = hosts.cell(m, layer - first_layer), self._held_LGS[layer]
                cells.append(self._refined(before, m, layer, self._on_L[layer], held_GS))
                loads_G = pairs_between(cells[-1], self._counts_MLGE[m, layer]).sum(axis=0)
                max_load_ML[m, layer - first_layer] = loads_G.max()
        hosts.write(begin, Hosts.of_cells(hosts.home_LE, cells))

    def why(self) -> dict[str, str]:
        """By option, whether it is on, and why. Final when all cells are refined."""
        return {name: self._why(name) for name in PRICED}

    def _why(self, name: str) -> str:
        if self._against[name] is not None:
            return f"off: {self._against[name]}"
        if name not in self._open:
            return "on: asked for"
        num_layers, num_off = len(self._on_L), sum(name not in on for on in self._on_L)
        if not num_off:
            return "on: where it saves time"
        state = "off" if num_off == num_layers else "on"
        return f"{state}: in {num_off} of {num_layers} layers, planning it would take more time than it saves"

    def _settle(self, layer: int, cell: CellPlan) -> None:
        """Turn open options off in a layer if they save less than planning them takes, in all cells as in its first."""
        assert self._costs is not None
        on = self._on_L[layer]
        nothing_held_GS = np.full_like(self._held_LGS[layer], -1)
        parts_SP = [
            cell_seconds(
                self._refined(cell, 0, layer, options, nothing_held_GS.copy()),
                self._counts_MLGE[0, layer],
                self._attention_ML2[0, layer],
                self._prices,
            )
            for options in (on - self._open, on)
        ]
        trials = ("pay_off" in self._open) + ("traffic" in self._open) * most_trials(self._topology.redundant_slots)
        plan_s = trials * self._costs.trial_s_per_count * self._counts_MLGE[0, layer].size
        # no cell runs before the last one is planned
        if parts_SP[0].sum() - parts_SP[1].sum() < plan_s:
            self._on_L[layer] = on - self._open

    def _refined(
        self, cell: CellPlan, micro_step: int, layer: int, on: set[str], held_GS: NDArray[np.int16]
    ) -> CellPlan:
        counts_GE, attention_s = self._counts_MLGE[micro_step, layer], self._attention_ML2[micro_step, layer]
        if "traffic" in on:
            target = math.ceil((1 + self._options.tolerance) * counts_GE.sum() / len(counts_GE))
            slots = self._topology.redundant_slots
            cell = replicate_for_traffic(cell, counts_GE, slots, target, attention_s, self._prices)
        if "pay_off" not in on:
            return cell
        if self._options.slots == "layer":
            # What was declined in an earlier micro-step is not in its slot, whatever the search for replicas planned.
            cell = cell._replace(fetched_R=held_GS[cell.rank_R, cell.slot_R] != cell.expert_R)
        cell = prune_replicas(cell, counts_GE, attention_s, self._prices)
        held_GS[cell.rank_R, cell.slot_R] = cell.expert_R
        return cell


def _reasons_against(topology: Topology, options: PlanOptions, costs: CostModel | None) -> dict[str, str | None]:
    """By option, why it cannot be on, or None."""
    reasons: dict[str, str | None] = dict.fromkeys(PRICED)
    if topology.num_nodes == 1:
        reasons["traffic"] = "all ranks share a node"
    elif options.slots == "layer":
        reasons["traffic"] = "slots of each layer keep what they hold, and it refills all"
    if costs is None:
        reasons = dict.fromkeys(PRICED, "nothing is priced")
    if not (options.replicas and topology.redundant_slots):
        reasons = dict.fromkeys(PRICED, "there are no replicas")
    return reasons | {name: "asked for" for name in PRICED if getattr(options, name) is False}
