"""What a balancer is given, and the form that it has; and the balancer that does nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import CountsError
from foreroute.plan.step_plan import CellHosts
from foreroute.plan.topology import Topology


@dataclass(frozen=True, eq=False)
class BalancerInput:
    """One step to balance.

    Attributes:
        counts_MLGE: integers [M, L, G, E].
        topology: ranks, nodes and redundant slots.
        home_LE: int16 [L, E], where the experts are when the step begins.
        previous_LE: int64 [L, E], assignments of the step before, or None where nothing is known of it.
        assignment_s: seconds that a rank takes for one assignment, in all passes of the step together.
        crossing_s: seconds that a rank takes to send or receive one assignment from another node, likewise.
        transfer_s: seconds that a rank takes to receive the weights of one expert.
        seed: of methods that search at random.
    """

    counts_MLGE: NDArray[np.integer]
    topology: Topology
    home_LE: NDArray[np.int16]
    previous_LE: NDArray[np.int64] | None = None
    assignment_s: float = 1.0
    crossing_s: float = 0.0
    transfer_s: float = 0.0
    seed: int = 0

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.counts_MLGE.shape[3])

    @property
    def slots(self) -> int:
        """Experts that one rank has room for: its share and the redundant ones."""
        return self.num_experts // self.topology.num_ranks + self.topology.redundant_slots

    def cells(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Layer and counts, int64 [G, E], of every cell, in the order of execution."""
        for counts_LGE in self.counts_MLGE:
            for layer, counts_GE in enumerate(counts_LGE):
                yield layer, np.ascontiguousarray(counts_GE, np.int64)

    def loads_LE(self) -> NDArray[np.int64]:
        """int64 [L, E], assignments of this whole step."""
        loads_LE: NDArray[np.int64] = self.counts_MLGE.sum(axis=(0, 2), dtype=np.int64)
        return loads_LE

    def previous_loads_LE(self) -> NDArray[np.int64]:
        """int64 [L, E].

        Raises:
            CountsError: when nothing is known of the step before.
        """
        if self.previous_LE is None:
            raise CountsError("this balancer plans from the step before; give its counts, or leave the balancer out")
        return self.previous_LE


Method = Callable[[BalancerInput], Iterator[CellHosts]]
"""Plans a step cell by cell, in the order of execution."""


class SlotContents:
    """What the ranks hold, so that only weights that move count as moved.

    A rank still has what it hosted in the last cell of the layer; before the first one, the homes.
    """

    def __init__(self, problem: BalancerInput) -> None:
        self._held_LEG = np.zeros((*problem.home_LE.shape, problem.topology.num_ranks), np.bool_)
        for layer, home_E in enumerate(problem.home_LE):
            self.clear(layer, home_E)

    def clear(self, layer: int, home_E: NDArray[np.integer]) -> None:
        """Forget all but the homes, for methods whose slots other layers use meanwhile."""
        self._held_LEG[layer] = False
        self._held_LEG[layer, np.arange(len(home_E)), home_E] = True

    def host(
        self, layer: int, expert_H: NDArray[np.int32], rank_H: NDArray[np.int32], tokens_HG: NDArray[np.int64]
    ) -> CellHosts:
        """The layer's next cell, with hosts that are there from now on, and they alone."""
        fetched_H = ~self._held_LEG[layer, expert_H, rank_H]
        self._held_LEG[layer] = False
        self._held_LEG[layer, expert_H, rank_H] = True
        return CellHosts(expert_H, rank_H, tokens_HG, fetched_H)


def static(problem: BalancerInput) -> Iterator[CellHosts]:
    """Nothing is balanced and nothing moves."""
    expert_H = np.arange(problem.num_experts, dtype=np.int32)
    nothing_H = np.zeros(problem.num_experts, np.bool_)
    for layer, counts_GE in problem.cells():
        yield CellHosts(expert_H, problem.home_LE[layer].astype(np.int32), counts_GE.T.copy(), nothing_H)
