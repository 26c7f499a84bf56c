"""The priced options, traffic and pay-off: in which layers of a step they are on and why, and the cells they change."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.links import served_loads
from foreroute.costs.model import PRICES, CostModel, Prices
from foreroute.costs.pricing import EXPOSED, parts_of_cells
from foreroute.kernels import INT, ArrayOf, compiled
from foreroute.plan.hosts import CELL_PLAN, CellPlan, Hosts
from foreroute.plan.options import PRICED, PlanOptions
from foreroute.plan.topology import Topology
from foreroute.planner.traffic import most_trials, replicate_for_traffic

FETCHES = ("host_fetch_s", "node_fetch_s", "cluster_fetch_s")
"""Prices of weights, which a slot that keeps what it holds gets once."""
LOOKAHEADS = ((0.0, 0.0), (0.5, 0.25))
"""Lookaheads where slots keep what they hold: what each later micro-step weighs by the one before, and by
how many fetches an expert that is held is wanted more, a fetch counted in rows that take as long. The second is tried
where transfers of the first expose time. On 18 steps of 2 or 3 ranks it brings plans from 4.2 to 2.4 % above the best;
with 0.9 for 0.5, to 2.6 %."""


class PricedOptions:
    """Changes cells where that saves time, if `is_any_on`. Layers may come from several threads."""

    def __init__(
        self,
        counts_MLGE: NDArray[np.int32],
        topology: Topology,
        options: PlanOptions,
        costs: CostModel | None,
        attention_ML2: NDArray[np.float64] | None,
    ) -> None:
        """Begin a step. Options that are left open are on until `refine` has looked at the first cell of a layer."""
        self._counts_MLGE, self._topology, self._options, self._costs = counts_MLGE, topology, options, costs
        self._against = _reasons_against(topology, options, costs)
        on = {name for name in PRICED if self._against[name] is None}
        self._open = {name for name in on if getattr(options, name) is None}
        self._on_L, self.is_any_on = [on] * counts_MLGE.shape[1], bool(on)
        if costs is not None and attention_ML2 is not None:
            self._prices, self._attention_ML2 = costs.prices(topology, options.slots), attention_ML2

    def refine(
        self, hosts: Hosts, max_load_ML: NDArray[np.int64], first_layer: int, count_planned: Callable[[int], None]
    ) -> None:
        """Give cells of some layers, from `first_layer` on, other replicas in `hosts` where that is faster."""
        refined = []
        for index in range(len(hosts.home_LE)):
            layer = first_layer + index
            cells = [hosts.cell(m, index) for m in range(len(max_load_ML))]
            if self._open:
                self._decide(layer, cells[0])
            cells = self._refined(cells, layer, self._on_L[layer], self._prices)
            refined.append(Hosts.of_cells(hosts.home_LE[index : index + 1], cells))
            count_planned(len(cells))
        found = Hosts.side_by_side(refined)
        hosts.write(0, found)
        counts_MLGE = self._counts_MLGE[:, first_layer : first_layer + len(hosts.home_LE)]
        served_MLG, *_ = served_loads(found, counts_MLGE, self._topology.ranks_per_node)
        np.max(served_MLG, axis=-1, out=max_load_ML)

    def why(self) -> dict[str, str]:
        """Say by option whether it is on, and why. Final when all cells are refined."""
        return {name: self._why(name) for name in PRICED}

    def _why(self, name: str) -> str:
        if self._against[name] is not None:
            return f"off: {self._against[name]}"
        if name not in self._open:
            return "on: asked for"
        num_layers, num_off = len(self._on_L), sum(name not in on for on in self._on_L)
        if not num_off:
            return "on: where it saves time"
        layers = f"in {num_off} of {num_layers} layers"
        state = f"off: {layers}," if num_off == num_layers else f"on: except {layers}, where"
        what = "weighing traffic between nodes" if name == "traffic" else "weighing each replica against its transfer"
        return f"{state} {what} would take more time than it saves"

    def _decide(self, layer: int, cell: CellPlan) -> None:
        """Turn open options off in a layer if they save less than planning them takes, in all cells as in its first."""
        assert self._costs is not None
        on, prices, size = self._on_L[layer], self._prices, self._window_size(len(self._counts_MLGE))
        if "traffic" in on:
            # what the first cell of a window fetches serves the others too
            prices = prices._replace(**{name: getattr(prices, name) / size for name in FETCHES})
        window = self._window(0, 1, layer, prices)
        seconds = [window.seconds(self._refined([cell], layer, options, prices)) for options in (on - self._open, on)]
        trials = ("pay_off" in self._open) + ("traffic" in self._open) * most_trials(window.slots) * (
            2 if size > 1 else 1
        )
        # no cell runs before the last one is planned
        if seconds[0] - seconds[1] < trials * self._costs.trial_s_per_count * self._counts_MLGE[0, layer].size:
            self._on_L[layer] = on - self._open

    def _refined(self, cells: list[CellPlan], layer: int, on: set[str], prices: Prices) -> list[CellPlan]:
        """The cells of a layer, from the first micro-step on."""
        size, found = self._window_size(len(cells)), list[CellPlan]()
        for m in range(0, len(cells), size):
            window, some = self._window(m, m + size, layer, prices), cells[m : m + size]
            if "pay_off" in on:
                some = window.pruned(some)
            if "traffic" in on:
                tried = [window.against_traffic(some, self._options.tolerance)]
                if "pay_off" in on:
                    # Dropping a replica here can force a later cell to fetch it, so both are tried on the whole window.
                    homes = [CellPlan.homes_only(cell.home_E, len(window.counts_MGE[0])) for cell in some]
                    tried += [window.pruned(tried[0]), homes]
                some = min(tried, key=window.seconds) if len(tried) > 1 else tried[0]
            found += some
        return found

    def _window_size(self, num_micro_steps: int) -> int:
        return num_micro_steps if self._options.slots == "layer" else 1

    def _window(self, begin: int, end: int, layer: int, prices: Prices) -> Window:
        counts_MGE = np.ascontiguousarray(self._counts_MLGE[begin:end, layer])
        attention_M2 = np.ascontiguousarray(self._attention_ML2[begin:end, layer])
        return Window(counts_MGE, attention_M2, self._topology.redundant_slots, prices)


class Window(NamedTuple):
    """Micro-steps of a layer in which slots keep what they hold, and before which they are empty."""

    counts_MGE: NDArray[np.int32]
    attention_M2: NDArray[np.float64]
    slots: int
    prices: Prices

    def parts(self, cells: list[CellPlan]) -> NDArray[np.float64]:
        """float64 [2 passes, 5 parts], of all cells together."""
        hosts = Hosts.of_cells(cells[0].home_E[None], cells)
        return parts_of_cells(hosts, self.counts_MGE[:, None], self.attention_M2[:, None], self.prices)

    def seconds(self, cells: list[CellPlan]) -> float:
        """Seconds of both passes of all cells."""
        return float(self.parts(cells).sum())

    def against_traffic(self, given: list[CellPlan], tolerance: float) -> list[CellPlan]:
        """Cells against traffic, where they are faster than these."""
        counts_MGE, prices = self.counts_MGE, self.prices
        target_M = np.ceil((1 + tolerance) * counts_MGE.sum(axis=(1, 2)) / counts_MGE.shape[1]).astype(np.int64)
        by_node = counts_MGE.reshape(len(given), -1, prices.ranks_per_node, counts_MGE.shape[2])
        demand_MNE, best, least_s = by_node.sum(axis=2).astype(np.float64), given, np.inf
        for decay, keeping in LOOKAHEADS[: len(given)]:
            keep = keeping * prices.cluster_fetch_s / prices.cluster_row_s
            wanted_MNE, found = demand_MNE.copy(), list[CellPlan]()
            for m in range(len(given) - 1, 0, -1):
                wanted_MNE[m - 1] += decay * wanted_MNE[m]
            held_GS = np.full((counts_MGE.shape[1], self.slots), -1, np.int16)
            for m, cell in enumerate(given):
                # what is fetched here serves the micro-steps to come too
                uses = 1 + (len(given) - m - 1) * decay
                each = prices._replace(**{name: getattr(prices, name) / uses for name in FETCHES})
                cell = cell._replace(fetched_R=held_GS[cell.rank_R, cell.slot_R] != cell.expert_R)
                cell = replicate_for_traffic(
                    cell, counts_MGE[m], wanted_MNE[m], held_GS, keep, target_M[m], self.attention_M2[m], each
                )
                held_GS[cell.rank_R, cell.slot_R] = cell.expert_R
                found.append(cell)
            if len(given) == 1:
                return found
            parts_SP, least_s = self.parts(found), min(least_s, self.seconds(given))
            if parts_SP.sum() < least_s:
                best, least_s = found, float(parts_SP.sum())
            if not parts_SP[:, EXPOSED].any():
                break
        return best

    def pruned(self, cells: list[CellPlan]) -> list[CellPlan]:
        """Cells without the replicas that do not pay."""
        held_GS = np.full((self.counts_MGE.shape[1], self.slots), -1, np.int16)
        found = []
        for given, counts_GE, attention_s in zip(cells, self.counts_MGE, self.attention_M2, strict=True):
            # what was dropped in an earlier micro-step is not in its slot, whatever was planned
            cell = given._replace(fetched_R=held_GS[given.rank_R, given.slot_R] != given.expert_R)
            kept_R, tokens_RG = np.empty(len(cell.expert_R), np.bool_), np.empty_like(cell.tokens_RG)
            if _prune(cell, counts_GE, attention_s, self.prices, kept_R, tokens_RG):
                cell = cell._replace(tokens_RG=tokens_RG).only(kept_R)
            held_GS[cell.rank_R, cell.slot_R] = cell.expert_R
            found.append(cell)
        return found


_prune = compiled(
    "prune_replicas",
    CELL_PLAN,
    ArrayOf(np.int32, 2),
    ArrayOf(np.float64, 1),
    PRICES,
    ArrayOf(np.bool_, 1, filled=True),
    ArrayOf(np.int32, 2, filled=True),
    returns=INT,
)
"""Drops replicas of one cell while their transfers expose time, and returns how many (prune.cpp)."""


def _reasons_against(topology: Topology, options: PlanOptions, costs: CostModel | None) -> dict[str, str | None]:
    """Reasons by option why it cannot be on, or None."""
    reasons: dict[str, str | None] = dict.fromkeys(PRICED)
    if topology.num_nodes == 1:
        reasons["traffic"] = "all ranks share a node"
    if costs is None:
        reasons = dict.fromkeys(PRICED, "nothing is priced")
    if not (options.replicas and topology.redundant_slots):
        reasons = dict.fromkeys(PRICED, "there are no replicas")
    return reasons | {name: "asked for" for name in PRICED if getattr(options, name) is False}
