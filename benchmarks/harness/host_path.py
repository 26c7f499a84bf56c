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

from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.host_memory import DIRECTORY, HostMemory
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.transfers import Transfer, TransferLane

WIDTH, INNER = 2048, 768
SMALLER = 16
"""Without a GPU, widths are so many times smaller."""
BURSTS = (1, 8, 32)
"""Experts that are copied at a time."""


@dataclass(frozen=True, eq=False)
class HostPath:
    """Experts of one layer, published, and slots for all of them: by name [experts, ...]."""

    home: dict[str, Tensor]
    slots: dict[str, Tensor]
    memory: HostMemory
    peers: PeerGroup
    lane: TransferLane

    @classmethod
    @contextmanager
    def opened(cls, device: torch.device) -> Iterator[HostPath]:
        """Publish as many experts as shared memory holds, in a group of one rank; `OSError` when it holds none."""
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
        with closing(HostMemory(votes, {0: home}, 1)) as memory:
            memory.publish(np.zeros((1, num_experts), np.int16), np.ones((1, num_experts, 1), np.bool_))
            slots = {name: torch.zeros_like(shard) for name, shard in home.items()}
            yield cls(home, slots, memory, peers, TransferLane(device))

    @property
    def num_experts(self) -> int:
        """Published experts."""
        return len(self.home["down_proj"])

    @property
    def bursts(self) -> list[int]:
        """Sizes of `BURSTS` that the published experts allow."""
        return [size for size in BURSTS if size <= self.num_experts]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(shard[0].nbytes for shard in self.home.values())

    def begin(self, size: int) -> Transfer:
        """Start to copy so many experts, in another order than they are published in."""
        copies = [
            (source, self.slots[name][slot])
            for slot in range(size)
            for name, source in self.memory.expert(0, size - 1 - slot).items()
        ]
        return Transfer(self.peers, "copying", [], [], copies, self.lane).post()

    def copy(self, size: int) -> None:
        """Copy so many experts, and wait for them."""
        self.begin(size).wait()


def _most_experts(expert_bytes: int) -> int:
    status = os.statvfs(DIRECTORY)
    free = status.f_bavail * status.f_frsize
    # a container's shared memory may be as small as 64 MB
    fitting = [size for size in BURSTS if 1.1 * size * expert_bytes < free]
    if not fitting:
        raise OSError(f"{DIRECTORY} has {free / 1e6:.0f} MB free, an expert takes {expert_bytes / 1e6:.1f} MB")
    return fitting[-1]
