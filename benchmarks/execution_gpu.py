"""One-GPU figures of the execution: host memory to slots, what of it hides behind a grouped GEMM, and count exchange.

Replicas of one rank come from another; on one GPU the rank's own published shard stands in for it, which is the same
copy. Run on the CPU, this only shows that it runs: `figures(torch.device("cpu"), tiny=True)`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.pairs import compare
from foreroute import planner
from foreroute.adapters import hf
from foreroute.experts import BatchRows
from foreroute.plan import Links, Topology
from foreroute.transfer import Moves
from foreroute.transfer.agreement import Votes
from foreroute.transfer.burst import Burst, Channels
from foreroute.transfer.exchange import PeerGroup
from foreroute.transfer.host_memory import HostMemory

EXPERTS, ROWS, REPEATS = 32, 2048, 20
WIDTH, INNER = 2048, 768
"""Of Qwen3-30B-A3B: 9.4 MB an expert in bfloat16."""
LINKS = Links(4e11, 5e10, 5e10, 5e-6, 1e-5)


def figures(device: torch.device, *, tiny: bool = False) -> dict[str, Any]:
    """Measure on one device.

    Returns:
        `host_copy_bytes_per_s` of a burst; `pinned_copy_bytes_per_s` of as many bytes in one copy, the ceiling;
        `host_copy_over_pinned`, the share of the ceiling; `hidden_share` of a burst behind grouped GEMMs that run
        beside it, `gemm_over_copy` times as long; `known_over_exchanged`, the time of forward and backward with counts
        known ahead over the same with counts exchanged in every layer.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            return _transfers(device, 8 if tiny else 1) | _dispatch(device, 16 if tiny else 1)
        finally:
            dist.destroy_process_group()


def _transfers(device: torch.device, smaller: int) -> dict[str, float]:
    width, inner = WIDTH // smaller, INNER // smaller
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = {"down_proj": (width, inner), "gate_up_proj": (2 * inner, width)}
    home = {name: torch.randn(EXPERTS, *shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    slots = {name: torch.empty_like(shard) for name, shard in home.items()}
    votes, peers = Votes(timeout_s=60), PeerGroup(timeout_s=60)
    with closing(HostMemory(votes, Topology(1, 1, EXPERTS, LINKS), [home])) as memory:
        memory.publish([home], 60)
        channels = Channels(peers, memory, checksums=False)

        def begin() -> Burst:
            row_V, none_V = np.arange(EXPERTS), np.zeros(EXPERTS, np.int64)
            moves = Moves(row_V, none_V, row_V, none_V, row_V)
            return Burst(channels, moves, np.ones(EXPERTS, np.bool_), 0, home, slots, "copying")

        burst_s = _seconds(device, lambda: _end(begin()))
        if any(not torch.equal(slots[name], home[name]) for name in home):
            raise AssertionError("the slots do not hold what was published")
        gemm = _gemm_of(device, home["gate_up_proj"], burst_s)
        gemm_s = _seconds(device, gemm)

        def both() -> None:
            burst = begin()
            gemm()
            _end(burst)

        both_s = _seconds(device, both)
    num_bytes = sum(tensor.nbytes for tensor in home.values())
    pinned_s = _pinned_seconds(device, num_bytes)
    return {
        "host_copy_bytes_per_s": num_bytes / burst_s,
        "pinned_copy_bytes_per_s": num_bytes / pinned_s,
        "host_copy_over_pinned": pinned_s / burst_s,
        "gemm_over_copy": gemm_s / burst_s,
        "hidden_share": 1 - (both_s - gemm_s) / burst_s,
    }


def _gemm_of(device: torch.device, weight: Tensor, at_least_s: float) -> Callable[[], None]:
    """Grouped GEMMs that take longer than a burst, so that all of it could hide."""
    rows = torch.randn(ROWS, weight.shape[2], dtype=weight.dtype, device=device)
    ends = torch.linspace(0, ROWS, EXPERTS + 1, device=device)[1:].to(torch.int32)

    def once() -> None:
        functional.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)

    times = 1 + int(2 * at_least_s / _seconds(device, once))

    def gemm() -> None:
        for _ in range(times):
            once()

    return gemm


def _pinned_seconds(device: torch.device, num_bytes: int) -> float:
    """One copy of as many bytes from memory that torch has page-locked itself."""
    source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return _seconds(device, lambda: target.copy_(source, non_blocking=True))


def _dispatch(device: torch.device, smaller: int) -> dict[str, Any]:
    """Passes of the same plan, with its counts and without."""
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": WIDTH // smaller,
        "moe_intermediate_size": INNER // smaller,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": WIDTH // smaller // 16,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
    }
    model = hf.build_model("qwen3_moe", seed=0, **sizes)
    if device.type == "cuda":
        model = model.to(device, torch.bfloat16)
    routed = hf.attach(model)
    placed = hf.distribute(model, timeout_s=60)
    batch = torch.from_numpy(np.random.default_rng(0).integers(0, 512, (4, 512 // smaller)))
    with routed.record() as recording, torch.no_grad():
        model(input_ids=batch.to(device), use_cache=False)
    trace = recording.trace()
    rows = BatchRows.replayed(trace, batch)
    assert rows.routed_LE is not None, "routes that are replayed are known"
    counts_MLGE = rows.routed_LE[None, :, None].astype(np.int32)
    plan = planner.plan(counts_MLGE, Topology(1, 1, 0, LINKS), home_LE=placed.home_LE)

    def passing(counts: Any) -> Callable[[], None]:
        def run() -> None:
            placed.begin_step(0, plan, counts)
            with routed.replay(trace), placed.executing(0, rows):
                logits = model(input_ids=batch.to(device), use_cache=False).logits
                logits.float().log_softmax(-1)[..., 0].mean().backward()
            model.zero_grad(set_to_none=True)
            _synchronize(device)

        return run

    ratio = compare(passing(counts_MLGE), passing(None), pairs=REPEATS)
    return {"known_over_exchanged": ratio.ratio, "known_over_exchanged_quartiles": [ratio.low, ratio.high]}


def _end(burst: Burst) -> None:
    objection = burst.wait(60)
    if objection is not None:
        raise AssertionError(objection)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The median of several, after a warm-up."""
    times = []
    for _ in range(REPEATS + 1):
        _synchronize(device)
        begun = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
