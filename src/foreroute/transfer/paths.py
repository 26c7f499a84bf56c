"""Which moves of a burst go through host memory and which from peer to peer, by expected finish time. Pure.

Every rank computes the choice for all ranks from the plan and the topology alone, because a sender must know what its
receivers expect. Links carry bytes side by side, so a burst ends when its busiest lane does: the lanes are, for each
rank, its host link, and its sending and receiving half of the node link and of the cluster link.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foreroute.plan import Topology
from foreroute.transfer.moves import Moves

Paths = Literal["auto", "host", "direct"]


def choose_host_V(moves: Moves, expert_bytes: int, topology: Topology, paths: Paths) -> NDArray[np.bool_]:
    """The moves that go through host memory.

    Args:
        moves: of one burst, all ranks.
        expert_bytes: of one expert's weights in this layer.
        topology: with the bandwidths; host memory reaches the ranks of a node.
        paths: "direct" uses no host memory; "host" all that it reaches; "auto" splits the burst so that it is expected
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
    return min(candidates, key=lambda host_V: burst_seconds(moves, host_V, expert_bytes, topology))


def burst_seconds(moves: Moves, host_V: NDArray[np.bool_], expert_bytes: int, topology: Topology) -> float:
    """Expected seconds from the start of a burst to its end, when the moves `host_V` go through host memory."""
    lanes = _Lanes(topology)
    for v in range(len(moves)):
        lanes.add(int(moves.source_V[v]), int(moves.target_V[v]), bool(host_V[v]), expert_bytes)
    return lanes.end_s


def _greedy(moves: Moves, reached_V: NDArray[np.bool_], expert_bytes: int, topology: Topology) -> NDArray[np.bool_]:
    """Moves with no choice first, then each other one on the path where it ends sooner."""
    lanes = _Lanes(topology)
    host_V = np.zeros(len(moves), np.bool_)
    for v in np.argsort(reached_V, kind="stable").tolist():
        source, target = int(moves.source_V[v]), int(moves.target_V[v])
        if reached_V[v]:
            ends = [lanes.end_of(source, target, on_host, expert_bytes) for on_host in (False, True)]
            host_V[v] = ends[1] < ends[0]
        lanes.add(source, target, bool(host_V[v]), expert_bytes)
    return host_V


class _Lanes:
    """Seconds of work given to every lane."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._busy_s: dict[tuple[str, int], float] = {}

    @property
    def end_s(self) -> float:
        return max(self._busy_s.values(), default=0.0)

    def add(self, source: int, target: int, on_host: bool, num_bytes: int) -> None:
        for lane, seconds in self._work(source, target, on_host, num_bytes):
            self._busy_s[lane] = seconds

    def end_of(self, source: int, target: int, on_host: bool, num_bytes: int) -> float:
        return max(seconds for _, seconds in self._work(source, target, on_host, num_bytes))

    def _work(self, source: int, target: int, on_host: bool, num_bytes: int) -> list[tuple[tuple[str, int], float]]:
        """Every lane that the move takes, with the time at which it would be free again."""
        links, per_node = self._topology.links, self._topology.ranks_per_node
        if on_host:
            taken, latency_s, rate = [("host", target)], 0.0, links.host_bytes_per_s
        elif source // per_node == target // per_node:
            taken = [("node out", source), ("node in", target)]
            latency_s, rate = links.node_latency_s, links.node_bytes_per_s
        else:
            taken = [("cluster out", source), ("cluster in", target)]
            latency_s, rate = links.cluster_latency_s, links.cluster_bytes_per_s
        return [(lane, self._busy_s.get(lane, latency_s) + num_bytes / rate) for lane in taken]
