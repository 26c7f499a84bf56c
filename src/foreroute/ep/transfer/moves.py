"""Which expert goes from which rank to which, and by which path. Pure functions of arrays; no torch, no processes.

The shard of a rank holds the experts that live there in ascending order of their id. A replica is fetched from the home
rank's shard into a redundant slot, and its gradient goes the way back.

Every rank computes the choice of paths for all ranks from the plan and the topology alone, because a sender must know
what its receivers expect. Links carry bytes side by side, so a batch ends when its busiest link does. The links are,
for each rank, its host link, and its sending and receiving half of the node link and of the cluster link.

Axis letters: V moves, R replicas, E experts, G ranks, P redundant slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import PlanError
from foreroute.plan import CellPlan, Topology

PathChoice = Literal["auto", "host", "direct"]
"""Which path weights take, as in `choose_host_V`."""
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


def home_row_E(home_E: NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 [E], the row of every expert in the shard of its home rank."""
    order = np.argsort(home_E, kind="stable")
    # An expert's place in this order, less that of the first of its rank, is how many of its rank come before it.
    sorted_E = home_E[order]
    row_E = np.empty(len(home_E), np.int64)
    row_E[order] = np.arange(len(home_E)) - np.searchsorted(sorted_E, sorted_E)
    return row_E


def held_after(moves: Moves, held_GP: NDArray[np.int64]) -> NDArray[np.int64]:
    """The table of slots once these replicas have arrived, as a new array."""
    held_GP = held_GP.copy()
    held_GP[moves.target_V, moves.target_row_V] = moves.expert_V
    return held_GP


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
    # every edge so far has a round, and no two edges of a sender or of a receiver have the same
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
    """Swap the rounds `free` along the path that leaves `target` in the round free at the source.

    The path ends, because each vertex has at most one edge in each round; and not at the source, which it could only
    reach in the round that is free there.
    """
    path, side, vertex, number = [], 1, target, 0
    # `vertex` is on the given side and is left by the round free[number]; sides and rounds alternate along the path.
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


def choose_host_V(moves: Moves, expert_bytes: int, topology: Topology, paths: PathChoice) -> NDArray[np.bool_]:
    """The moves that go through host memory.

    Args:
        moves: of one batch, all ranks.
        expert_bytes: of one expert's weights in this layer.
        topology: with the bandwidths; host memory reaches the ranks of a node.
        paths: "direct" uses no host memory; "host" all that it reaches; "auto" splits the batch so that it is expected
            to end soonest, and never later than either of the two alone.

    Returns:
        bool [V].
    """
    reached_V: NDArray[np.bool_] = topology.node_G[moves.source_V] == topology.node_G[moves.target_V]
    nowhere_V = np.zeros(len(moves), np.bool_)
    if paths == "direct":
        return nowhere_V
    if paths == "host":
        return reached_V
    candidates = [_greedy(moves, reached_V, expert_bytes, topology), reached_V, nowhere_V]
    return min(candidates, key=lambda host_V: batch_seconds(moves, host_V, expert_bytes, topology))


def batch_seconds(moves: Moves, host_V: NDArray[np.bool_], expert_bytes: int, topology: Topology) -> float:
    """Expected seconds from the start of a batch to its end, when the moves `host_V` go through host memory."""
    links = _LinkTimes(topology)
    for v in range(len(moves)):
        links.add(int(moves.source_V[v]), int(moves.target_V[v]), bool(host_V[v]), expert_bytes)
    return links.end_s


def _greedy(moves: Moves, reached_V: NDArray[np.bool_], expert_bytes: int, topology: Topology) -> NDArray[np.bool_]:
    """Moves with no choice first, then each other one on the path where it ends sooner."""
    links = _LinkTimes(topology)
    host_V = np.zeros(len(moves), np.bool_)
    # A link that must carry a move is busy before the first choice is made, so that choices go round it.
    for v in np.argsort(reached_V, kind="stable").tolist():
        source, target = int(moves.source_V[v]), int(moves.target_V[v])
        if reached_V[v]:
            ends = [links.end_of(source, target, on_host, expert_bytes) for on_host in (False, True)]
            host_V[v] = ends[1] < ends[0]
        links.add(source, target, bool(host_V[v]), expert_bytes)
    return host_V


class _LinkTimes:
    """The time at which every link that was given work is free again, in seconds from the start of the batch."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._busy_s: dict[tuple[str, int], float] = {}

    @property
    def end_s(self) -> float:
        return max(self._busy_s.values(), default=0.0)

    def add(self, source: int, target: int, on_host: bool, num_bytes: int) -> None:
        for link, seconds in self._work(source, target, on_host, num_bytes):
            self._busy_s[link] = seconds

    def end_of(self, source: int, target: int, on_host: bool, num_bytes: int) -> float:
        return max(seconds for _, seconds in self._work(source, target, on_host, num_bytes))

    def _work(self, source: int, target: int, on_host: bool, num_bytes: int) -> list[tuple[tuple[str, int], float]]:
        """Every link that the move takes, with the time at which it would be free again."""
        # A link pays its latency once: the moves of a batch go out together, and later ones follow without a pause.
        links, per_node = self._topology.links, self._topology.ranks_per_node
        if on_host:
            taken, latency_s, rate = [("host", target)], 0.0, links.host_bytes_per_s
        elif source // per_node == target // per_node:
            taken = [("node out", source), ("node in", target)]
            latency_s, rate = links.node_latency_s, links.node_bytes_per_s
        else:
            taken = [("cluster out", source), ("cluster in", target)]
            latency_s, rate = links.cluster_latency_s, links.cluster_bytes_per_s
        return [(link, self._busy_s.get(link, latency_s) + num_bytes / rate) for link in taken]
