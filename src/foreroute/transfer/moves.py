"""Which expert goes from which rank to which, read off a plan. Pure functions of arrays; no torch, no processes.

The shard of a rank holds the experts that live there in ascending order of their id. A replica is fetched from the home
rank's shard into a redundant slot, and its gradient goes the way back. Axis letters: V moves, R replicas, E experts,
G ranks, P redundant slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import PlanError
from foreroute.plan import CellPlan, StepPlan

EMPTY = -1
"""In a table of slots: the slot holds no expert."""


@dataclass(frozen=True, eq=False)
class Moves:
    """Experts to be copied from rank to rank. All arrays int64 [V].

    Attributes:
        expert_V: logical expert.
        source_V: rank that has it.
        source_row_V: row of it there: of the shard, or of the replicas of the cell in order of slot.
        target_V: rank that gets it.
        target_row_V: row there: of the slots, or of the shard.
    """

    expert_V: NDArray[np.int64]
    source_V: NDArray[np.int64]
    source_row_V: NDArray[np.int64]
    target_V: NDArray[np.int64]
    target_row_V: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.expert_V)

    def take(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Moves:
        """The moves at these indices, or where the mask is True."""
        return Moves(*(array[chosen] for array in vars(self).values()))

    @property
    def arrivals(self) -> Moves:
        """The same moves, in order of target, into a buffer of their own: target rows count what each rank gets."""
        nth_V = np.arange(len(self)) - np.searchsorted(self.target_V, self.target_V)
        return Moves(self.expert_V, self.source_V, self.source_row_V, self.target_V, nth_V)

    @property
    def round_V(self) -> NDArray[np.int64]:
        """int64 [V], from 0: in a round, no rank sends two experts, and none receives two. As few rounds as can be."""
        return rounds(self.source_V, self.target_V)


def replica_moves(cell: CellPlan, held_GP: NDArray[np.integer] | None = None) -> Moves:
    """Home shards to slots, for the replicas of a cell that their slots do not hold yet.

    Args:
        cell: the plan of the cell.
        held_GP: integers [G, P], the expert that every slot of every rank holds for this layer, or `EMPTY`. All slots
            are empty by default.

    Returns:
        In ascending order of target rank and slot.
    """
    rank_R, slot_R, expert_R = (a.astype(np.int64) for a in (cell.rank_R, cell.slot_R, cell.expert_R))
    order = np.lexsort((slot_R, rank_R))
    if held_GP is not None:
        order = order[held_GP[rank_R[order], slot_R[order]] != expert_R[order]]
    expert_V = expert_R[order]
    home_E = cell.home_E.astype(np.int64)
    return Moves(expert_V, home_E[expert_V], home_row_E(home_E)[expert_V], rank_R[order], slot_R[order])


def gradient_moves(cell: CellPlan) -> Moves:
    """Replicas back to home shards, for the gradient of every replica of a cell, whenever it was fetched.

    `source_row_V` counts the replicas of the source rank in ascending order of slot.

    Returns:
        In ascending order of target rank, row there, and source rank: the order in which gradients are added.
    """
    there = replica_moves(cell).arrivals
    home_row_V = home_row_E(cell.home_E)[there.expert_V]
    moves = Moves(there.expert_V, there.target_V, there.target_row_V, there.source_V, home_row_V)
    return moves.take(np.lexsort((moves.source_V, moves.target_row_V, moves.target_V)))


def shard_moves(before_E: NDArray[np.integer], after_E: NDArray[np.integer]) -> Moves:
    """Home shards to home shards, for every expert of a layer whose rank or row changes with its home.

    Args:
        before_E: integers [E], home ranks so far.
        after_E: integers [E], home ranks from now on.

    Raises:
        PlanError: when a rank would hold more or fewer experts than before.
    """
    num_before_G, num_after_G = np.bincount(before_E), np.bincount(after_E, minlength=int(before_E.max(initial=-1)) + 1)
    if not np.array_equal(num_before_G, num_after_G):
        raise PlanError(
            f"ranks hold {num_before_G.tolist()} experts before and {num_after_G.tolist()} after a change of homes; "
            "expected every rank to keep its number, for shards do not change their size"
        )
    before_row_E, after_row_E = home_row_E(before_E), home_row_E(after_E)
    expert_V = np.flatnonzero((before_E != after_E) | (before_row_E != after_row_E))
    before_V, after_V = before_E[expert_V].astype(np.int64), after_E[expert_V].astype(np.int64)
    return Moves(expert_V, before_V, before_row_E[expert_V], after_V, after_row_E[expert_V])


def without_replicas(cell: CellPlan) -> CellPlan:
    """The cell with the home placement in force: the homes serve all tokens."""
    none = slice(0)
    return CellPlan(
        cell.home_E,
        cell.expert_R[none],
        cell.rank_R[none],
        cell.slot_R[none],
        cell.fetched_R[none],
        cell.tokens_RG[none],
    )


def home_row_E(home_E: NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 [E], the row of every expert in the shard of its home rank."""
    order = np.argsort(home_E, kind="stable")
    sorted_E = home_E[order]
    row_E = np.empty(len(home_E), np.int64)
    row_E[order] = np.arange(len(home_E)) - np.searchsorted(sorted_E, sorted_E)
    return row_E


def held_after(moves: Moves, held_GP: NDArray[np.int64]) -> NDArray[np.int64]:
    """The table of slots once these replicas have arrived, as a new array."""
    held_GP = held_GP.copy()
    held_GP[moves.target_V, moves.target_row_V] = moves.expert_V
    return held_GP


def least_fetches_L(plan: StepPlan) -> NDArray[np.int64]:
    """int64 [L], the fewest experts that one pass over a step can fetch for each layer: what the plan does not keep."""
    num_micro_steps, num_layers, _ = plan.shape
    before_R = np.concatenate([[0], np.cumsum(plan.fetched_R, dtype=np.int64)])
    fetches_ML: NDArray[np.int64] = np.diff(before_R[plan.offsets]).reshape(num_micro_steps, num_layers)
    return np.asarray(fetches_ML.sum(axis=0))


def rounds(source_V: NDArray[np.integer], target_V: NDArray[np.integer]) -> NDArray[np.int64]:
    """Colour the edges of a bipartite multigraph of senders and receivers with as many colours as its largest degree.

    König's theorem: that many are enough, and fewer cannot be. An edge takes a round that is free at both ends; if
    there is none, the path that alternates between the round free at one end and that free at the other is flipped.

    Args:
        source_V: integers [V].
        target_V: integers [V].

    Returns:
        int64 [V], from 0.
    """
    if not len(source_V):
        return np.zeros(0, np.int64)
    num_rounds = int(max(np.bincount(source_V).max(), np.bincount(target_V).max()))
    ends = (source_V, target_V)
    edge_at = [np.full((int(end.max()) + 1, num_rounds), EMPTY, np.int64) for end in ends]
    for v in range(len(source_V)):
        free = [int(np.argmax(edge_at[side][ends[side][v]] == EMPTY)) for side in (0, 1)]
        if free[0] != free[1]:
            _flip(edge_at, ends, int(target_V[v]), free)
        for side in (0, 1):
            edge_at[side][ends[side][v], free[0]] = v
    round_V = np.empty(len(source_V), np.int64)
    rank, number = np.nonzero(edge_at[0] != EMPTY)
    round_V[edge_at[0][rank, number]] = number
    return round_V


def _flip(
    edge_at: list[NDArray[np.int64]], ends: tuple[NDArray[np.integer], ...], target: int, free: list[int]
) -> None:
    """Swap the rounds `free` along the path that leaves `target` in the round free at the source."""
    path, side, vertex, number = [], 1, target, 0
    while (edge := int(edge_at[side][vertex, free[number]])) != EMPTY:
        path.append((edge, free[number], free[1 - number]))
        side, number = 1 - side, 1 - number
        vertex = int(ends[side][edge])
    for edge, old, _ in path:
        for side in (0, 1):
            edge_at[side][ends[side][edge], old] = EMPTY
    for edge, _, new in path:
        for side in (0, 1):
            edge_at[side][ends[side][edge], new] = edge
