"""Experts of one layer in shared host memory, and slots on the device that they are copied to.

Replicas of one rank come from another; on one GPU the rank's own published shard stands in for it, which is the same
copy. Experts are those of Qwen3-30B-A3B, 9.4 MB each in bfloat16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.execution_bench import LINKS
from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.host_memory import DIRECTORY, HostMemory
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.slots import Channels, TransferBatch, TransferLane
from foreroute.plan import Topology
from foreroute.plan.schedule import MOVE

WIDTH, INNER = 2048, 768
SMALLER = 16
"""Without a GPU, widths are so many times smaller."""
BURSTS = (1, 8, 32)
"""Experts that are copied at a time."""
WAIT_S = 60


@dataclass(frozen=True, eq=False)
class HostPath:
    """Experts of one layer, published, and slots for all of them.

    Attributes:
        home: name -> [experts, ...].
        slots: name -> [experts, ...].
        memory: that the home is published in.
        channels: for bursts.
    """

    home: dict[str, Tensor]
    slots: dict[str, Tensor]
    memory: HostMemory
    channels: Channels

    @classmethod
    @contextmanager
    def opened(cls, device: torch.device) -> Iterator[HostPath]:
        """With as many experts as shared memory holds, in a process group of one rank.

        Raises:
            OSError: when it holds none.
            TransferError: when it cannot be page-locked.
        """
        smaller = 1 if device.type == "cuda" else SMALLER
        width, inner = WIDTH // smaller, INNER // smaller
        shapes = {"down_proj": (width, inner), "gate_up_proj": (2 * inner, width)}
        num_experts = _most_experts(2 * sum(map(prod, shapes.values())))
        generator = torch.Generator(device).manual_seed(0)
        home = {
            name: torch.randn(num_experts, *shape, dtype=torch.bfloat16, device=device, generator=generator)
            for name, shape in shapes.items()
        }
        votes, peers = RankConsensus(timeout_s=60), PeerGroup(timeout_s=60)
        with closing(HostMemory(votes, Topology(1, 1, num_experts, LINKS), {0: home})) as memory:
            memory.publish({0: home})
            slots = {name: torch.zeros_like(shard) for name, shard in home.items()}
            yield cls(home, slots, memory, Channels(peers, memory, TransferLane(device)))

    @property
    def num_experts(self) -> int:
        """That are published."""
        return len(self.home["down_proj"])

    @property
    def bursts(self) -> list[int]:
        """Those of `BURSTS` that the published experts allow."""
        return [size for size in BURSTS if size <= self.num_experts]

    @property
    def expert_bytes(self) -> int:
        """Of one expert."""
        return sum(shard[0].nbytes for shard in self.home.values())

    def begin(self, size: int) -> TransferBatch:
        """Start to copy so many experts, in another order than they are published in."""
        served = np.zeros(size, MOVE)
        served["slot"], served["row"], served["by_host"] = np.arange(size), np.arange(size)[::-1], True
        return TransferBatch(self.channels, served[:0], served, 0, self.home, self.slots, "copying")

    def copy(self, size: int) -> None:
        """Copy so many experts, and wait for them."""
        self.begin(size).wait(WAIT_S)


def _most_experts(expert_bytes: int) -> int:
    status = os.statvfs(DIRECTORY)
    free = status.f_bavail * status.f_frsize
    fitting = [size for size in BURSTS if 1.1 * size * expert_bytes < free]
    if not fitting:
        raise OSError(f"{DIRECTORY} has {free / 1e6:.0f} MB free, an expert takes {expert_bytes / 1e6:.1f} MB")
    return fitting[-1]
