"""Costs of replay in Megatron-Core: step time, replayed over native, and host memory of routes that wait their turn.

A step runs through Megatron's own schedule: forward and backward of two micro-batches, their routes placed in the step.
Both sides are the same model on its own routes, so that experts have the same work; the native side calls the forward
step unwrapped, outside any session. An A/A line says how far apart two equal things measure on this machine. Times are
CPU time of the one thread that works. A time that the run does not resolve is None (`harness.pairs`).

What executing a plan brings on two processes is measured by `harness.megatron_plan`.

Memory is that of the buffers themselves: what Megatron's `RouterReplay` objects hold after `set_replay_data`, and what
`place` makes of the same trace, found by walking over both.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.megatron_plan import planned_step
from benchmarks.harness.models import (
    CPU,
    Losses,
    Sizes,
    forward_step,
    gpt_model,
    keep_memory,
    run_schedule,
    start_megatron,
)
from benchmarks.harness.pairs import PairedRatio, compare, near_one
from foreroute import layout
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace

SIZES = Sizes(hidden=1024, heads=16, kv_heads=4, experts=16, top_k=8, expert_width=384, vocabulary=1024)
"""Layers of half the width of Qwen3-30B-A3B, with an eighth of its experts."""
SEQUENCES, WIDTH, MICRO_BATCHES = 2, 64, 2
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
QUEUED = {"queue": (48, 128, 8), "queue_above_256_experts": (61, 512, 8)}
"""(layers, experts, K) of models whose routes wait: Qwen3-30B-A3B, and one whose ids take two bytes."""


def run(*, quick: bool) -> dict[str, Any]:
    """Medians and quartiles over interleaved pairs, and bytes per token."""
    # in processes of its own, before this one begins a process group
    planned = planned_step(0 if quick else 14)
    torch.set_num_threads(1)
    keep_memory()
    with tempfile.TemporaryDirectory() as folder:
        start_megatron(folder, CPU)
        measured = _measured(*((2, 2) if quick else (40, 20)))
    return measured | {"metrics": measured["metrics"] | planned}


def _measured(many: int, few: int) -> dict[str, Any]:
    ratio = partial(compare, clock=time.thread_time)
    figures: dict[str, PairedRatio] = {}
    for name, settings in RECOMPUTE.items():
        bench = Bench.of(settings)
        if name == "none":
            figures["step"] = ratio(bench.replayed(), bench.native, pairs=many)
            figures["step_a_over_a"] = ratio(partial(bench.native), bench.native, pairs=many)
            figures["step_with_telemetry"] = ratio(bench.replayed(telemetry=True), bench.native, pairs=few)
        else:
            figures[f"step_{name}_recompute"] = ratio(bench.replayed(), bench.native, pairs=few)
    metrics: dict[str, Any] = {}
    for name, figure in figures.items():
        metrics |= near_one(name, figure)
    for name, shape in QUEUED.items():
        replay, planned = _queued_bytes_per_token(*shape)
        metrics |= {f"{name}_bytes_ratio": round(replay / planned, 2), f"{name}_bytes_per_token": round(planned, 1)}
        metrics[f"{name}_bytes_per_token_of_router_replay"] = round(replay, 1)
    return {
        "metrics": metrics,
        "baselines": {"step_a_over_a": figures["step_a_over_a"].shown()},
        "setting": {
            "sizes": SIZES._asdict(),
            "tokens": [MICRO_BATCHES, SEQUENCES, WIDTH],
            "pairs": [many, few],
            "queued": QUEUED,
        },
    }


@dataclass(frozen=True)
class Bench:
    """One model, its micro-batches and their own routes."""

    model: Any
    routed: Any
    tokens: list[Tensor]
    traces: list[RoutingTrace]

    @classmethod
    def of(
        cls, settings: dict[str, Any], sizes: Sizes = SIZES, device: torch.device = CPU, width: int = WIDTH
    ) -> Bench:
        """Build a model with these settings, and micro-batches of sequences of this many tokens."""
        from foreroute.adapters import megatron

        model = gpt_model(sizes, settings, width).to(device=device, dtype=settings.get("params_dtype"))
        generator = torch.Generator().manual_seed(0)
        drawn = [
            torch.randint(0, sizes.vocabulary, (SEQUENCES, width), generator=generator) for _ in range(MICRO_BATCHES)
        ]
        tokens = [each.to(device) for each in drawn]
        routed = megatron.attach(model)
        with routed.record() as recording:
            run_schedule(model, forward_step, [{"tokens": each} for each in tokens])
        parts = np.split(np.arange(MICRO_BATCHES * SEQUENCES), MICRO_BATCHES)
        return cls(model, routed, tokens, [recording.trace().select(part) for part in parts])

    def native(self) -> Losses:
        """Forward and backward of all micro-batches; their losses by token."""
        return run_schedule(self.model, forward_step, [{"tokens": each} for each in self.tokens])

    def shards(self, traces: list[RoutingTrace] | None = None) -> list[Any]:
        """Its own routes as micro-batches bring them, or others."""
        placed = [(trace, layout.pad(trace.lengths, side="right", order="sbhd")) for trace in traces or self.traces]
        return [self.routed.shard(*each) for each in placed]

    def replayed(
        self, *, telemetry: bool = False, traces: list[RoutingTrace] | None = None, shards: list[Any] | None = None
    ) -> Callable[[], Losses]:
        """Make a step on its own routes, or on others, placed in the step unless they are given as `shards`."""
        forward = self.routed.replaying(forward_step, telemetry=telemetry)

        def run() -> Losses:
            routes = self.shards(traces) if shards is None else shards
            batches = [{"tokens": t, "routes": r} for t, r in zip(self.tokens, routes, strict=True)]
            return run_schedule(self.model, forward, batches)

        return run


def _queued_bytes_per_token(num_layers: int, num_experts: int, top_k: int) -> tuple[float, float]:
    """Weigh one micro-batch of 8 sequences, held by `RouterReplay` objects and by `RouteShard`."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    from foreroute.adapters.megatron.forward_args import Share
    from foreroute.adapters.megatron.route_shard import shard

    spec = RoutingSpec(num_experts, top_k, tuple(map(RoutedLayer, range(num_layers))))
    trace = synthetic_trace(spec, [1024] * 8, seed=0, complete=True)
    RouterReplay.clear_global_router_replay_instances()
    routers = [RouterReplay() for _ in range(num_layers)]
    ids_NLK = torch.from_numpy(trace.expert_ids_NLK.astype(np.int64))
    RouterReplay.set_replay_data([ids_NLK[:, i].contiguous() for i in range(num_layers)])
    home_LE = np.zeros((num_layers, num_experts), np.int16)
    placed = shard(trace, layout.pad(trace.lengths, side="right", order="sbhd"), Share(), spec.layers, home_LE)
    return _held(routers) / trace.num_rows, _held(placed) / trace.num_rows


def _held(root: object) -> int:
    """Bytes of all arrays and tensors that can be reached from an object, each once."""
    found: dict[int, int] = {}
    waiting, seen = [root], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(each, np.ndarray):
            owner = each if each.base is None or not isinstance(each.base, np.ndarray) else each.base
            found[owner.__array_interface__["data"][0]] = owner.nbytes
        elif isinstance(each, list | tuple):
            waiting += each
        elif hasattr(each, "__dict__") and not isinstance(each, type):
            waiting += vars(each).values()
    return sum(found.values())
