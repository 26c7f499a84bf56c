"""Experts that change their home: which goes from which rank to which row of which rank. No torch, no processes.

The shard of a rank holds the experts that live there in ascending order of their id. Axis letters: V moves, E experts,
G ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import PlanError


@dataclass(frozen=True, eq=False)
class Moves:
    """Experts to be copied from rank to rank. All arrays int64 [V].

    Attributes:
        expert_V: logical expert.
        source_V: rank that has it.
        source_row_V: row of its shard there.
        target_V: rank that gets it.
        target_row_V: row of the shard there.
    """

    expert_V: NDArray[np.int64]
    source_V: NDArray[np.int64]
    source_row_V: NDArray[np.int64]
    target_V: NDArray[np.int64]
    target_row_V: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.expert_V)

    @property
    def round_V(self) -> NDArray[np.int64]:
        """int64 [V], from 0: in a round, no rank sends two experts, and none receives two. As few rounds as can be."""
        # numba loads with the first move
        from foreroute.plan.schedule_kernels import colour_edges

        round_V = np.zeros(len(self), np.int64)
        num_ranks = int(max(self.source_V.max(initial=0), self.target_V.max(initial=0))) + 1
        colour_edges(self.source_V, self.target_V, np.empty((2, num_ranks, max(len(self), 1)), np.int64), round_V)
        return round_V


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


def home_row_E(home_E: NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 [E], the row of every expert in the shard of its home rank."""
    order = np.argsort(home_E, kind="stable")
    # An expert's place in this order, less that of the first of its rank, is how many of its rank come before it.
    sorted_E = home_E[order]
    row_E = np.empty(len(home_E), np.int64)
    row_E[order] = np.arange(len(home_E)) - np.searchsorted(sorted_E, sorted_E)
    return row_E
