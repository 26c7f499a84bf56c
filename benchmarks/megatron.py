"""What replay costs in Megatron-Core: step time, replayed over native, and host memory of routes that wait their turn.

A step runs through Megatron's own schedule: forward and backward of two micro-batches, their routes placed in the step.
Both sides are the same model on its own routes, so that experts have the same work; the native side calls the forward
step unwrapped, outside any session. An A/A line says how far apart two equal things measure on this machine. Times are
CPU time of the one thread that works. A time that the run does not resolve is None (`harness.pairs`); user instructions
stand beside it.

What executing a plan brings on two processes is measured by `harness.megatron_plan`.

Memory is that of the buffers themselves: what Megatron's `RouterReplay` objects hold after `set_replay_data`, and what
`place` makes of the same trace, found by walking over both.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.instructions import count_in_user_space
from benchmarks.harness.megatron_plan import forward_step, planned_step
from benchmarks.harness.pairs import PairedRatio, compare, near_one
from benchmarks.replay import keep_memory
from foreroute import layout
from foreroute.testing import megatron_on_cpu
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import RoutedLayer, RoutingSpec, RoutingTrace

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_query_groups": 4,
    "ffn_hidden_size": 1024,
    "num_moe_experts": 16,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 384,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "gated_linear_unit": True,
}
"""Layers of half the width of Qwen3-30B-A3B, with an eighth of its experts."""

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
VOCABULARY, SEQUENCES, WIDTH, MICRO_BATCHES = 1024, 2, 64, 2
CPU = torch.device("cpu")
Losses = list[dict[str, Tensor]]
QUEUED = {"queue": (48, 128, 8), "queue_above_256_experts": (61, 512, 8)}
"""(layers, experts, K) of models whose routes wait: Qwen3-30B-A3B, and one whose ids take two bytes."""


def run(*, quick: bool) -> dict[str, Any]:
    """Medians and quartiles over interleaved pairs, and bytes per token."""
    # in processes of its own, before this one begins a process group
    planned = planned_step(0 if quick else 14)
    torch.set_num_threads(1)
    keep_memory()
    with tempfile.TemporaryDirectory() as folder:
        start(folder, CPU)
        measured = _measured(*((2, 2) if quick else (40, 20)))
    return measured | {"metrics": measured["metrics"] | planned}


def _measured(many: int, few: int) -> dict[str, Any]:
    counting = count_in_user_space()
    ratio = partial(compare, clock=time.thread_time, counter=counting.counter)
    figures: dict[str, PairedRatio] = {}
    for name, settings in RECOMPUTE.items():
        bench = Bench.of(settings)
        if name == "none":
            figures["step"] = ratio(bench.replayed(), bench.native, pairs=many)
            figures["step_a_over_a"] = ratio(partial(bench.native), bench.native, pairs=many)
            figures["step_with_telemetry"] = ratio(bench.replayed(telemetry=True), bench.native, pairs=few)
        else:
            figures[f"step_{name}_recompute"] = ratio(bench.replayed(), bench.native, pairs=few)
    metrics: dict[str, Any] = counting.reported()
    for name, figure in figures.items():
        metrics |= near_one(name, figure)
    for name, shape in QUEUED.items():
        theirs, ours = _queued_bytes_per_token(*shape)
        metrics |= {f"{name}_bytes_ratio": round(theirs / ours, 2), f"{name}_bytes_per_token": round(ours, 1)}
        metrics[f"{name}_bytes_per_token_of_router_replay"] = round(theirs, 1)
    return {
        "metrics": metrics,
        "baselines": {"step_a_over_a": dataclasses.asdict(figures["step_a_over_a"])},
        "setting": {
            "sizes": SIZES,
            "tokens": [MICRO_BATCHES, SEQUENCES, WIDTH],
            "pairs": [many, few],
            "queued": QUEUED,
        },
    }


@dataclasses.dataclass(frozen=True)
class Bench:
    """One model, its micro-batches and their own routes."""

    model: Any
    routed: Any
    tokens: list[Tensor]
    traces: list[RoutingTrace]

    @classmethod
    def of(cls, settings: dict[str, Any], device: torch.device = CPU, width: int = WIDTH) -> Bench:
        """With this recomputation, and sequences of this many tokens."""
        from foreroute.adapters import megatron

        model = built(settings, width).to(device=device, dtype=settings.get("params_dtype"))
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randint(0, VOCABULARY, (SEQUENCES, width), generator=generator) for _ in range(MICRO_BATCHES)]
        tokens = [each.to(device) for each in drawn]
        routed = megatron.attach(model)
        with routed.record() as recording:
            _step(model, forward_step, [{"tokens": each} for each in tokens])
        parts = np.split(np.arange(MICRO_BATCHES * SEQUENCES), MICRO_BATCHES)
        return cls(model, routed, tokens, [recording.trace().select(part) for part in parts])

    def native(self) -> Losses:
        """Forward and backward of all micro-batches; their losses by token."""
        return _step(self.model, forward_step, [{"tokens": each} for each in self.tokens])

    def shards(self, traces: list[RoutingTrace] | None = None) -> list[Any]:
        """Its own routes as micro-batches bring them, or others."""
        placed = [(trace, layout.pad(trace.lengths, side="right", order="sbhd")) for trace in traces or self.traces]
        return [self.routed.shard(*each) for each in placed]

    def replayed(
        self, *, telemetry: bool = False, traces: list[RoutingTrace] | None = None, shards: list[Any] | None = None
    ) -> Callable[[], Losses]:
        """The same on its own routes, or on others, which are placed in the step unless they are given as `shards`."""
        forward = self.routed.replaying(forward_step, telemetry=telemetry)

        def run() -> Losses:
            routes = self.shards(traces) if shards is None else shards
            batches = [{"tokens": t, "routes": r} for t, r in zip(self.tokens, routes, strict=True)]
            return _step(self.model, forward, batches)

        return run


def start(folder: str, device: torch.device) -> None:
    """Megatron on this machine, in a world of one rank."""
    if device.type == "cpu":
        megatron_on_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(0)


def built(settings: dict[str, Any], width: int, position_embedding_type: str = "rope") -> Any:
    """A model of `SIZES` and these settings, for sequences of up to this many tokens."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(0)
    silu = {"activation_func": torch.nn.functional.silu}
    config = TransformerConfig(**{**megatron_on_cpu.CONFIG, **SIZES, **silu, **settings})
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=VOCABULARY,
        max_sequence_length=width,
        position_embedding_type=position_embedding_type,
        share_embeddings_and_output_weights=False,
    ).train()


def _step(model: Any, forward: Callable[..., Any], batches: list[dict[str, Any]]) -> Losses:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.zero_grad(set_to_none=True)
    sequences, width = batches[0]["tokens"].shape
    losses: Losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=width,
        micro_batch_size=sequences,
        forward_only=False,
    )
    return losses


def _queued_bytes_per_token(num_layers: int, num_experts: int, top_k: int) -> tuple[float, float]:
    """Of one micro-batch of 8 sequences, held by `RouterReplay` objects and by `RouteShard`."""
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
