"""Input and form of a balancer; and the balancer that does nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel
from foreroute.errors import CountsError
from foreroute.plan.hosts import CellPlan
from foreroute.plan.options import SlotSharing
from foreroute.plan.step_plan import StepPlan
from foreroute.plan.topology import Topology
from foreroute.planner.packed_homes import PackedSequences

Sequences = Callable[[], PackedSequences]
"""Counts the assignments of every sequence of a step, which take more memory than those of ranks."""


@dataclass(frozen=True, eq=False)
class BalancerInput:
    """One step to balance.

    Attributes:
        counts_MLGE: integers [M, L, G, E].
        topology: ranks, nodes and redundant slots.
        home_LE: int16 [L, E], where the experts are when the step begins.
        previous_LE: int64 [L, E], assignments of the step before, or None where nothing is known of it.
        costs: the cost model, for methods that weigh seconds.
        squares_MG: int64 [M, G], sums of squared lengths of sequences, or None where lengths are not known. The cost of
            attention grows with them.
        sequences: those that the counts are of, or None where nothing is known of them.
        previous_sequences: those of the step before.
    """

    counts_MLGE: NDArray[np.integer]
    topology: Topology
    home_LE: NDArray[np.int16]
    previous_LE: NDArray[np.int64] | None = None
    costs: CostModel | None = None
    squares_MG: NDArray[np.int64] | None = None
    sequences: Sequences | None = None
    previous_sequences: Sequences | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.counts_MLGE.shape[3])

    @property
    def experts_per_rank(self) -> int:
        """Experts that one rank has room for: its share and the redundant slots."""
        return self.num_experts // self.topology.num_ranks + self.topology.redundant_slots

    def cells(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Layer and counts, int64 [G, E], of every cell, in the order of execution."""
        for counts_LGE in self.counts_MLGE:
            for layer, counts_GE in enumerate(counts_LGE):
                yield layer, np.ascontiguousarray(counts_GE, np.int64)

    def packed_as(self, packed: PackedSequences) -> BalancerInput:
        """Give the step with its sequences packed anew."""
        squares_MG = packed.packing.sums(packed.lengths_S**2)
        return replace(self, counts_MLGE=packed.counts_MLGE(), squares_MG=squares_MG)

    def loads_LE(self) -> NDArray[np.int64]:
        """int64 [L, E], assignments of this whole step."""
        loads_LE: NDArray[np.int64] = self.counts_MLGE.sum(axis=(0, 2), dtype=np.int64)
        return loads_LE

    def previous_loads_LE(self) -> NDArray[np.int64]:
        """int64 [L, E]. Raises `CountsError` when nothing is known of the step before."""
        if self.previous_LE is None:
            raise CountsError("this balancer plans from the step before; give its counts, or leave the balancer out")
        return self.previous_LE


Method = Callable[[BalancerInput], Iterator[CellPlan] | StepPlan | tuple[BalancerInput, StepPlan]]
"""Makes a plan, or the cells of a step in the order of execution. The homes of a layer are those of its first cell, the
same in all; slots are not numbered. A home among the replicas is a rank that gave up its own expert and fetches it
back. A method that packs sequences anew gives the step as it packed it beside its plan."""


@dataclass(frozen=True)
class Balancer:
    """A method and what it knows.

    Attributes:
        label: for tables.
        knows: the loads that it plans from: "nothing", "previous step", "step" or "micro-step".
        method: makes a plan, or yields the hosts of each cell.
        slots: of yielded cells: each layer has redundant slots of its own, or all layers share one set, which is empty
            at every cell.
    """

    label: str
    knows: str
    method: Method
    slots: SlotSharing = "layer"


class HeldExperts:
    """Holdings of all ranks, so that only weights that move count as moved.

    With `rehomes` the first host of each expert in a layer's first cell becomes its home before the step. Otherwise
    homes stay, where gradients return to.
    """

    def __init__(self, problem: BalancerInput, *, rehomes: bool = False) -> None:
        # a rank still has what it hosted in the last cell of the layer; before the first one, the homes
        self._home_LE = problem.home_LE.astype(np.int16)
        self._held_LEG = np.zeros((*problem.home_LE.shape, problem.topology.num_ranks), np.bool_)
        self._is_placed_L = [not rehomes] * len(problem.home_LE)
        for layer in range(len(problem.home_LE)):
            self.clear(layer)

    def clear(self, layer: int) -> None:
        """Forget all but the homes, for methods whose slots other layers use meanwhile."""
        self._held_LEG[layer] = False
        self._hold_homes(layer)

    def host(
        self, layer: int, expert_H: NDArray[np.integer], rank_H: NDArray[np.integer], tokens_HG: NDArray[np.integer]
    ) -> CellPlan:
        """The layer's next cell, with hosts that are there from now on, and they alone."""
        # homes move before the step, and are no fetches of its first cell
        if not self._is_placed_L[layer]:
            _, first_E = np.unique(expert_H, return_index=True)
            self._home_LE[layer] = rank_H[first_E]
            self._hold_homes(layer)
            self._is_placed_L[layer] = True
        home_E, held_EG = self._home_LE[layer], self._held_LEG[layer]
        fetched_H = ~held_EG[expert_H, rank_H]
        # a rank that no longer hosts an expert frees its place at once
        held_EG[:] = False
        held_EG[expert_H, rank_H] = True
        listed_H = fetched_H | (rank_H != home_E[expert_H])
        return CellPlan(
            home_E,
            expert_H[listed_H].astype(np.int16),
            rank_H[listed_H].astype(np.int16),
            np.full(listed_H.sum(), -1, np.int16),
            fetched_H[listed_H],
            tokens_HG[listed_H].astype(np.int32),
        )

    def _hold_homes(self, layer: int) -> None:
        home_E = self._home_LE[layer]
        self._held_LEG[layer, np.arange(len(home_E)), home_E] = True


def static(problem: BalancerInput) -> Iterator[CellPlan]:
    """Nothing is balanced and nothing moves."""
    for layer, counts_GE in problem.cells():
        yield CellPlan.homes_only(problem.home_LE[layer].astype(np.int16), len(counts_GE))
