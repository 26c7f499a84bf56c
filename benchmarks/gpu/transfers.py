"""Expert weights on one GPU: from host memory to slots, behind grouped GEMMs, and in expert-parallel steps.

Replicas of one rank come from another; on one GPU the rank's own published shard stands in for it, which is the same
copy. Steps are in `expert_parallel.py`. Experts are those of Qwen3-30B-A3B, 9.4 MB each in bfloat16.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu import expert_parallel
from benchmarks.gpu.part import Part, Skipped
from benchmarks.harness.execution_bench import LINKS
from benchmarks.harness.pairs import compare
from foreroute.ep.transfer.consensus import RankConsensus
from foreroute.ep.transfer.host_memory import DIRECTORY, HostMemory
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.slots import Channels, TransferBatch, TransferLane
from foreroute.plan import Topology
from foreroute.plan.schedule import MOVE

WIDTH, INNER = 2048, 768
BURSTS = (1, 8, 32)
"""Experts that are copied at a time."""
HIDDEN_BURST = 8
"""1.4 ms at the 55 GB/s of PCIe 5."""
GEMMS_OVER_COPY = (1, 2, 4)
LEAST_GEMM_S = 1e-3
ROWS = 32768
SMALLER = 16
"""Without a GPU, widths are so many times smaller."""
PAIRS, FEW_PAIRS = 30, 4
WAIT_S = 60


def run(part: Part) -> None:
    """Copies, what hides of them, and steps. Where two ranks are forked, they come before any thread is started."""
    if part.device.type == "cpu":
        expert_parallel.two_ranks(part)
    with group_of_one(part.device):
        copies(part)
        expert_parallel.one_rank(part)
        expert_parallel.empty_groups(part)
        expert_parallel.waits(part)
        expert_parallel.passes(part)
    if part.device.type == "cuda":
        expert_parallel.two_ranks(part)


@contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    """A world of one rank, on NCCL beside gloo for a GPU."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def copies(part: Part) -> None:
    """The host path: right, page-locked, near its ceiling, and hidden."""
    with ExitStack() as stack:
        paths: list[HostPath] = []
        with part.check("shared memory is page-locked"):
            paths.append(stack.enter_context(HostPath.opened(part)))
            paths[0].require_page_locked()
        for path in paths:
            _measure(part, path)


def _measure(part: Part, path: HostPath) -> None:
    bursts = [size for size in BURSTS if size <= path.num_experts]
    part.record(expert_mb=round(path.expert_bytes / 1e6, 2), largest_burst_experts=bursts[-1])
    with part.check("experts arrive whole in their slots"):
        for size in bursts:
            path.require_whole(size)
    with part.check("host path timed"):
        ratios = [_time_copy(part, path, size) for size in bursts]
        low, median, high = ratios[-1]
        part.record(host_path_ratio=median, host_path_ratio_quartiles=[low, high], host_path_ratio_aim=">= 0.9")
    with part.check("hidden behind grouped GEMMs"):
        size = max(size for size in bursts if size <= HIDDEN_BURST)
        shares = [_hide(part, path, size, ratio) for ratio in GEMMS_OVER_COPY]
        low, median, high = min(shares, key=lambda share: share[1])
        part.record(hidden_share=median, hidden_share_quartiles=[low, high], hidden_share_aim=">= 0.9")


@dataclass(frozen=True, eq=False)
class HostPath:
    """Experts of one layer, published, and slots for all of them.

    Attributes:
        part: that this is of.
        home: name -> [experts, ...].
        slots: name -> [experts, ...].
        memory: that the home is published in.
        channels: for bursts.
    """

    part: Part
    home: dict[str, Tensor]
    slots: dict[str, Tensor]
    memory: HostMemory
    channels: Channels

    @classmethod
    @contextmanager
    def opened(cls, part: Part) -> Iterator[HostPath]:
        """With as many experts as shared memory holds, of the sizes that are measured.

        Raises:
            Skipped: when it holds none.
            TransferError: when it cannot be page-locked.
        """
        smaller = 1 if part.full else SMALLER
        width, inner = WIDTH // smaller, INNER // smaller
        shapes = {"down_proj": (width, inner), "gate_up_proj": (2 * inner, width)}
        num_experts = _most_experts(2 * sum(map(prod, shapes.values())))
        generator = torch.Generator(part.device).manual_seed(0)
        home = {
            name: torch.randn(num_experts, *shape, dtype=torch.bfloat16, device=part.device, generator=generator)
            for name, shape in shapes.items()
        }
        votes, peers = RankConsensus(timeout_s=60), PeerGroup(timeout_s=60)
        with closing(HostMemory(votes, Topology(1, 1, num_experts, LINKS), [home])) as memory:
            memory.publish([home])
            slots = {name: torch.zeros_like(shard) for name, shard in home.items()}
            yield cls(part, home, slots, memory, Channels(peers, memory, TransferLane(part.device)))

    @property
    def num_experts(self) -> int:
        """That are published."""
        return len(self.home["down_proj"])

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

    def require_page_locked(self) -> None:
        """Raise `AssertionError` if a copy would be staged, by the driver, through memory that is."""
        if self.part.device.type == "cpu":
            raise Skipped("only copies to a GPU need it")
        for name in self.home:
            if not self.memory.row(0, 0, name, self.num_experts - 1).is_pinned():
                raise AssertionError(f"{name} of the published shard is in memory that CUDA has not page-locked")

    def require_whole(self, size: int) -> None:
        """Raise `AssertionError` unless a burst fills its slots with the experts that were asked for, and no others."""
        for slots in self.slots.values():
            slots.zero_()
        self.copy(size)
        for name, slots in self.slots.items():
            wanted = torch.zeros_like(slots)
            wanted[:size] = self.home[name][:size].flip(0)
            wrong = (slots != wanted).flatten(1).any(1).nonzero().flatten().tolist()
            if wrong:
                raise AssertionError(
                    f"a burst of {size} experts: slots {wrong} of {name} do not hold what was published"
                )


def _most_experts(expert_bytes: int) -> int:
    status = os.statvfs(DIRECTORY)
    free = status.f_bavail * status.f_frsize
    fitting = [size for size in BURSTS if 1.1 * size * expert_bytes < free]
    if not fitting:
        raise Skipped(f"{DIRECTORY} has {free / 1e6:.0f} MB free, an expert takes {expert_bytes / 1e6:.1f} MB")
    return fitting[-1]


def _time_copy(part: Part, path: HostPath, size: int) -> tuple[float, float, float]:
    """A burst against one copy of as many bytes, from memory that torch has page-locked itself: quartiles."""
    num_bytes = size * path.expert_bytes
    source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=part.device.type == "cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=part.device)
    in_one = partial(target.copy_, source, non_blocking=True)
    burst = partial(path.copy, size)
    ratio = compare(partial(part.timed, burst), partial(part.timed, in_one), pairs=PAIRS if part.full else FEW_PAIRS)
    launches = []
    for _ in range(PAIRS if part.full else FEW_PAIRS):
        part.synchronize()
        begun = time.perf_counter()
        under_way = path.begin(size)
        launches.append(time.perf_counter() - begun)
        under_way.wait(WAIT_S)
    name = f"host_path_{size}_experts"
    rate = num_bytes / (ratio.baseline_ms / 1e3) / 1e9
    low, median, high = (round(1 / value, 4) for value in (ratio.high, ratio.ratio, ratio.low))
    part.record(**{f"{name}_ratio": median})
    part.record(**{f"{name}_ratio_quartiles": [low, high]})
    part.record(
        **{
            f"page_locked_{size}_experts_gb_per_s": round(rate, 2),
            f"{name}_gb_per_s": round(rate * median, 2),
            f"{name}_launch_ms": round(statistics.median(launches) * 1e3, 4),
        }
    )
    return low, median, high


def _hide(part: Part, path: HostPath, size: int, ratio: int) -> tuple[float, float, float]:
    """A burst beside grouped GEMMs that take `ratio` times as long: quartiles of the share of it that does not show."""
    once = _gemm(part, path)
    once_s = statistics.median(part.timed(once) for _ in range(5))
    copy_s = statistics.median(part.timed(partial(path.copy, size)) for _ in range(5))
    times, before = (1 + int(seconds / once_s) for seconds in (max(ratio * copy_s, LEAST_GEMM_S), LEAST_GEMM_S))
    beside = partial(_beside, part, partial(_repeated, once, before), partial(_repeated, once, times))
    beside(None)
    shares, slowdowns, alone = [], [], []
    for _ in range(PAIRS if part.full else FEW_PAIRS):
        alone_s, _ = beside(None)
        copy_s = part.timed(partial(path.copy, size))
        gemms_s, all_s = beside(partial(path.begin, size))
        shares.append(1 - (all_s - alone_s) / copy_s)
        slowdowns.append(gemms_s / alone_s)
        alone.append(alone_s)
    part.record(**{f"gemms_{ratio}x_ms": round(statistics.median(alone) * 1e3, 3)})
    _record_quartiles(part, f"gemms_beside_copy_{ratio}x_ratio", slowdowns)
    return _record_quartiles(part, f"hidden_{ratio}x_share", shares)


def _record_quartiles(part: Part, name: str, values: list[float]) -> tuple[float, float, float]:
    low, median, high = (round(value, 4) for value in statistics.quantiles(values, n=4))
    part.record(**{name: median})
    part.record(**{f"{name}_quartiles": [low, high]})
    return low, median, high


def _beside(
    part: Part, before: Callable[[], None], gemms: Callable[[], None], begin: Callable[[], TransferBatch] | None
) -> tuple[float, float]:
    """Seconds of the GEMMs, and of them and the burst together, where the device has work while the host launches."""
    part.synchronize()
    if part.device.type == "cpu":
        begun = time.perf_counter()
        burst = begin() if begin else None
        gemms()
        gemms_s = time.perf_counter() - begun
        if burst:
            burst.wait(WAIT_S)
        return gemms_s, time.perf_counter() - begun
    first, computed, over = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    before()
    first.record()
    burst = begin() if begin else None
    gemms()
    computed.record()
    if burst:
        burst.wait(WAIT_S)
    over.record()
    over.synchronize()
    return float(first.elapsed_time(computed)) / 1e3, float(first.elapsed_time(over)) / 1e3


def _gemm(part: Part, path: HostPath) -> Callable[[], None]:
    """A grouped GEMM over all experts."""
    weight = path.home["gate_up_proj"]
    num_rows = ROWS if part.full else ROWS // SMALLER**2
    rows = torch.ones(num_rows, weight.shape[2], dtype=weight.dtype, device=part.device)
    ends = torch.linspace(0, num_rows, len(weight) + 1, device=part.device)[1:].to(torch.int32)

    def once() -> None:
        functional.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)

    once()
    return once


def _repeated(work: Callable[[], None], times: int) -> None:
    for _ in range(times):
        work()
