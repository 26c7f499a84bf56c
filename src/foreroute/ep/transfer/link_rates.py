"""What messages and copies of this machine reach, measured in a moment, for the choice of paths.

It changes no result: paths differ in time alone. Rates that plans are priced by come from a topology file, so that a
run makes the same plans again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from foreroute.ep.transfer.consensus import RankConsensus
from foreroute.ep.transfer.peers import Message, PeerGroup
from foreroute.plan import Links

LARGE_BYTES = 1 << 22
"""About the weights of a small expert; well above what latency dominates."""
ROUNDS = 3
"""The best of them counts: others met something else on the machine."""


def measure_links(peers: PeerGroup, consensus: RankConsensus, ranks_per_node: int, device: torch.device) -> Links:
    """Measure bandwidths and latencies, of the slowest rank. A collective call.

    Each rank sends to the next one of its node, then to its like in the next node; where there is one node, or one rank
    in each, both links are what the ranks have.

    Args:
        peers: the ranks.
        consensus: of the same ranks.
        ranks_per_node: ranks g with the same g // ranks_per_node share a node.
        device: of weights.

    Returns:
        The same on all ranks.

    Raises:
        TransferError: when a rank is gone.
    """
    large, small = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (LARGE_BYTES, 1))
    on_host = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    near = _next_in_node(peers.rank, ranks_per_node) if ranks_per_node > 1 else _next_node(peers, ranks_per_node)
    far = _next_node(peers, ranks_per_node) if peers.size > ranks_per_node else near
    seconds = [_best(partial(_exchange, peers, *ends, sent), device) for ends in (near, far) for sent in (large, small)]
    seconds.append(_best(lambda: large.copy_(on_host), device))
    nanoseconds = torch.tensor([max(int(value * 1e9), 1) for value in seconds])
    slowest = consensus.most(nanoseconds, "measuring links").tolist()
    near_s, near_latency_s, far_s, far_latency_s, copy_s = (value / 1e9 for value in slowest)
    return Links(
        LARGE_BYTES / near_s,
        LARGE_BYTES / far_s,
        LARGE_BYTES / copy_s,
        node_latency_s=near_latency_s,
        cluster_latency_s=far_latency_s,
    )


def _next_in_node(rank: int, ranks_per_node: int) -> tuple[int, int]:
    """To whom a rank sends and from whom it receives, round the ranks of its node."""
    first, place = rank - rank % ranks_per_node, rank % ranks_per_node
    return first + (place + 1) % ranks_per_node, first + (place - 1) % ranks_per_node


def _next_node(peers: PeerGroup, ranks_per_node: int) -> tuple[int, int]:
    """The same, round the nodes."""
    return (peers.rank + ranks_per_node) % peers.size, (peers.rank - ranks_per_node) % peers.size


def _exchange(peers: PeerGroup, target: int, source: int, sent: Tensor) -> None:
    received = torch.empty_like(sent)
    peers.begin([Message(target, 0, sent)], [Message(source, 0, received)], "measuring links").wait()


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest round, after one that warms up."""
    seconds = []
    for _ in range(1 + ROUNDS):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])
