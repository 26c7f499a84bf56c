"""Plans of one cell, made from its own counts when they are there: what executors plan that see only now.

Homes stay, so that replicas alone travel; a plan says which there are and who serves which token. All ranks make it
alike. What slots hold since earlier cells is known, and not fetched again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.balancers.llep import in_order
from foreroute.kernels import NONE, kernel
from foreroute.plan import CellPlan, Topology
from foreroute.plan.hosts import Hosts
from foreroute.plan.options import SlotSharing
from foreroute.planner.cell import look_ahead, new_cell
from foreroute.planner.replicas import plan_block
from foreroute.simulate.eplb import eplb_placement, even_split

CellPlanner = Callable[[int, NDArray[np.int64]], CellPlan]
"""The plan of the next cell of a routed layer, from its number and counts [G, E]."""
Served = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Expert and rank of every host, int64 [H], and the tokens [H, G] that it serves."""


@dataclass(frozen=True)
class Baseline:
    """An executor that sees only now.

    Attributes:
        planner: gives the planner of cells, of homes [L, E], a topology, and what becomes of slots between cells.
        slots: redundant slots of a rank; None for as many as it has home experts.
        sharing: as in `PlanOptions`.
    """

    planner: Callable[[NDArray[np.int16], Topology, SlotSharing], CellPlanner]
    slots: int | None = None
    sharing: SlotSharing = "layer"


class FromHosts:
    """Cells of a planner that says nothing of slots.

    A replica takes the slot that holds its expert, or else an empty one, or the one that was used longest ago.

    Args:
        serve: gives the hosts of a cell, homes among them, of its counts [G, E], homes [E] and slots of a rank.
        home_LE: int16 [L, E].
        topology: with the slots.
        sharing: "shared" has slots that are empty at every cell.
    """

    def __init__(
        self,
        serve: Callable[[NDArray[np.int64], NDArray[np.int16], int], Served],
        home_LE: NDArray[np.int16],
        topology: Topology,
        sharing: SlotSharing,
    ) -> None:
        self._serve, self._home_LE, self._slots, self._sharing = serve, home_LE, topology.redundant_slots, sharing
        # by layer and rank: the slot of each expert, the one used last behind the others
        self._held: list[list[dict[int, int]]] = [[{} for _ in range(topology.num_ranks)] for _ in home_LE]

    def __call__(self, layer: int, counts_GE: NDArray[np.int64]) -> CellPlan:
        home_E = self._home_LE[layer]
        expert_H, rank_H, tokens_HG = self._serve(counts_GE, home_E, self._slots)
        is_replica_H = (rank_H != home_E[expert_H]) & tokens_HG.any(axis=1)
        expert_R, rank_R = expert_H[is_replica_H].astype(np.int16), rank_H[is_replica_H].astype(np.int16)
        slot_R, fetched_R = self._placed(layer, expert_R.tolist(), rank_R.tolist())
        return CellPlan(home_E, expert_R, rank_R, slot_R, fetched_R, tokens_HG[is_replica_H].astype(np.int32))

    def _placed(self, layer: int, experts: list[int], ranks: list[int]) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
        """The slot of each replica, and whether it is to be fetched."""
        held_G = self._held[layer]
        if self._sharing == "shared":
            for held in held_G:
                held.clear()
        fetched_R = np.array([e not in held_G[g] for e, g in zip(experts, ranks, strict=True)], np.bool_)
        for r in np.argsort(fetched_R, kind="stable").tolist():  # what is kept first, which nothing is to overwrite
            held = held_G[ranks[r]]
            if fetched_R[r]:
                slot = len(held) if len(held) < self._slots else held.pop(next(iter(held)))
            else:
                slot = held.pop(experts[r])
            held[experts[r]] = slot
        slots = [held_G[g][e] for e, g in zip(experts, ranks, strict=True)]
        return np.array(slots, np.int16), fetched_R


class Ours:
    """The planner of the product on one cell after the other: what it foresees is all that it lacks."""

    TOLERANCE = 0.02

    def __init__(self, home_LE: NDArray[np.int16], topology: Topology, sharing: SlotSharing) -> None:
        num_ranks, slots, (num_layers, num_experts) = topology.num_ranks, topology.redundant_slots, home_LE.shape
        self._home_LE, self._most, self._is_kept = home_LE, num_ranks * slots, sharing == "layer"
        self._held_LH = np.full((num_layers, num_experts + self._most), NONE, np.int32)
        nothing = look_ahead(np.zeros((1, 1, num_ranks, num_experts), np.int32), home_LE[:1])
        self._cell = new_cell(num_ranks, num_experts, slots, topology.ranks_per_node, nothing, self._is_kept)

    def __call__(self, layer: int, counts_GE: NDArray[np.int64]) -> CellPlan:
        counts_MLGE, home_LE = counts_GE[None, None].astype(np.int32), self._home_LE[layer : layer + 1]
        demand_MLE, surplus_MLG = look_ahead(counts_MLGE, home_LE)
        cell = self._cell._replace(demand_MLE=demand_MLE, surplus_MLG=surplus_MLG)
        hosts = Hosts.with_room(home_LE, 1, len(counts_GE), self._most)
        held_LH, figures_C2 = self._held_LH[layer : layer + 1], np.zeros((1, 2), np.int64)
        plan_block(cell, counts_MLGE, hosts, figures_C2, held_LH, (0, 1, 0, 1), self.TOLERANCE, True)
        found: CellPlan = hosts.cell(0, 0)
        return found


def eplb(counts_GE: NDArray[np.int64], home_E: NDArray[np.int16], slots: int) -> Served:
    """EPLB of one cell, whose first copies are the homes.

    Whatever has the largest load per copy is replicated until all slots are used; the copies beside homes are packed
    from the heaviest down, each into the lightest rank with a free slot. Every source splits its tokens evenly.
    """
    num_ranks, num_experts = counts_GE.shape
    loads_E = counts_GE.sum(axis=0)
    copies_E = np.bincount(eplb_placement(loads_E, num_experts + num_ranks * slots, num_ranks), minlength=num_experts)
    share_E, copies_EG = loads_E / copies_E, np.zeros((num_experts, num_ranks), np.int64)
    copies_EG[np.arange(num_experts), home_E] = 1
    load_G, free_G = np.bincount(home_E, share_E, num_ranks), np.full(num_ranks, slots)
    heaviest_E = np.argsort(-share_E, kind="stable")
    for e in np.repeat(heaviest_E, copies_E[heaviest_E] - 1):
        lightest = np.where(free_G > 0, load_G, np.inf).argmin()
        copies_EG[e, lightest] += 1
        load_G[lightest] += share_E[e]
        free_G[lightest] -= 1
    expert_H, rank_H = np.nonzero(copies_EG)
    return expert_H, rank_H, even_split(expert_H, copies_EG[expert_H, rank_H], counts_GE)


def filled_exactly(counts_GE: NDArray[np.int64], home_E: NDArray[np.int16], slots: int) -> Served:
    """MoonEP's way: every rank computes as many assignments as every other, give or take one.

    After the public description of github.com/MoonshotAI/MoonEP. While a rank is above the mean, the one that is most
    above fills the one that is most below, all at once: a rank borrows from one other, and so E / G experts at most,
    which is how many slots it needs. Those with most assignments left go first. An expert's assignments are cut in the
    order of their sources, in ascending order of the rank that serves them.
    """
    served_EG = _filled(counts_GE, home_E)
    expert_H, rank_H = np.nonzero(served_EG)
    return expert_H, rank_H, in_order(expert_H, served_EG[expert_H, rank_H], counts_GE)


@kernel
def _filled(counts_GE: Any, home_E: Any) -> Any:
    """int64 [E, G], what each rank serves of each expert."""
    num_ranks, num_experts = counts_GE.shape
    left_E = counts_GE.sum(axis=0)
    total = left_E.sum()
    served_EG = np.zeros((num_experts, num_ranks), np.int64)
    above_G = np.zeros(num_ranks, np.int64)
    for e in range(num_experts):
        served_EG[e, home_E[e]] = left_E[e]
        above_G[home_E[e]] += left_E[e]
    for g in range(num_ranks):
        above_G[g] -= total // num_ranks + (g < total % num_ranks)
    given_GG = np.zeros((num_ranks, num_ranks), np.int64)
    while above_G.max() > 0:
        giver, taker = int(above_G.argmax()), int(above_G.argmin())
        given_GG[giver, taker] = -above_G[taker]
        above_G[giver] += above_G[taker]
        above_G[taker] = 0
    for giver in range(num_ranks):
        while given_GG[giver].max() > 0:
            taker, most = int(given_GG[giver].argmax()), -1
            for e in range(num_experts):
                if home_E[e] == giver and (most < 0 or left_E[e] > left_E[most]):
                    most = e
            taken = min(left_E[most], given_GG[giver, taker])
            served_EG[most, taker] += taken
            served_EG[most, giver] -= taken
            left_E[most] -= taken
            given_GG[giver, taker] -= taken
    return served_EG


BASELINES = {
    "online_eplb": Baseline(partial(FromHosts, eplb), slots=2),
    "online_exact": Baseline(partial(FromHosts, filled_exactly)),
    "online_exact_pool": Baseline(partial(FromHosts, filled_exactly), sharing="shared"),
    "online_ours": Baseline(Ours, slots=2),
}
"""By name. MoonEP has one pool of slots for all layers; to be given a set for each is more than it asks for."""
