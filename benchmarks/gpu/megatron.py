"""Replay in Megatron-Core's schedule on the device: native bits, foreign routes, and the step's time.

The models are those of `benchmarks/megatron.py`, without Transformer Engine, in a world of one rank.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu.driving import deterministic
from benchmarks.gpu.part import Part, Skipped
from benchmarks.harness.pairs import compare
from benchmarks.megatron import MICRO_BATCHES, RECOMPUTE, SEQUENCES, SIZES, Bench, Losses, start
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import RoutingTrace

SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "ffn_hidden_size": 128,
    "moe_ffn_hidden_size": 64,
    "num_attention_heads": 4,
}
LARGE: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_moe_experts": 32,
    "moe_ffn_hidden_size": 768,
    "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
    "bf16": True,
}
"""Layers of Qwen3-30B-A3B with a quarter of its experts."""
LARGE_WIDTH = 2048
PAIRS, FEW_PAIRS = 20, 3


def run(part: Part) -> None:
    """Bits with every kind of recomputation, then time."""
    with tempfile.TemporaryDirectory() as folder:
        with part.check("Megatron-Core starts"):
            start(folder, part.device)
        if part.checks["Megatron-Core starts"] != "passed":
            return
        try:
            with sorted_picks(), deterministic():
                for recompute, settings in RECOMPUTE.items():
                    _bits(part, recompute, settings)
            _cost(part)
        finally:
            dist.destroy_process_group()


@contextmanager
def sorted_picks() -> Iterator[None]:
    """Routers of Megatron-Core 0.19 ask for picks in order of their scores in a forward with gradients alone.

    On a GPU the unpatched model then sums the scores of a row in one order in its forward and in another in its
    recomputation, and so has other bits in the two. Replay repeats the order of the forward.
    """
    top_k = torch.topk

    def in_order(*args: Any, **kwargs: Any) -> Any:
        return top_k(*args, **{**kwargs, "sorted": True})

    with mock.patch.object(torch, "topk", in_order):
        yield


def _bits(part: Part, recompute: str, settings: dict[str, Any]) -> None:
    name = f"{recompute} recomputation"
    benches: list[Bench] = []
    with part.check(f"own routes are native bits, {name}"):
        benches.append(Bench.of(SMALL | settings, part.device))
        require_native_bits(benches[0])
    for bench in benches:
        with part.check(f"foreign routes are obeyed, {name}"):
            require_obeyed(bench)


def require_native_bits(bench: Bench) -> None:
    """Raise `AssertionError` unless losses and gradients under the model's own routes are those without replay.

    Raises:
        Skipped: when the unpatched model does not repeat its own bits.
    """
    first, again, replayed = (_bits_of(bench, run) for run in (bench.native, bench.native, bench.replayed()))
    if unsteady := _differing(first, again):
        raise Skipped(f"the unpatched model does not repeat its own bits here: {unsteady[0]}")
    if wrong := _differing(first, replayed):
        raise AssertionError(f"{len(wrong)} of {len(first)} losses and gradients differ, {wrong[0]} among them")


def require_obeyed(bench: Bench) -> None:
    """Raise `AssertionError` unless every router picks, for every token, the experts of routes that are not its own."""
    foreign = [_other_routes(trace, seed) for seed, trace in enumerate(bench.traces)]
    with _picks(bench) as picked:
        bench.replayed(traces=foreign)()
    for layer, maps in enumerate(picked):
        # where it is recomputed, a router runs twice before the next micro-batch begins
        runs = len(maps) // MICRO_BATCHES
        for number, picked_NE in enumerate(maps):
            own_NE, wanted_NE = (_as_map(traces[number // runs], layer) for traces in (bench.traces, foreign))
            if np.array_equal(own_NE, wanted_NE):
                raise AssertionError("the foreign routes are the model's own")
            wrong_N = (picked_NE != wanted_NE).any(axis=1)
            if wrong_N.any():
                raise AssertionError(f"routed layer {layer}: {wrong_N.sum()} of {len(wrong_N)} tokens went elsewhere")


def _other_routes(trace: RoutingTrace, seed: int) -> RoutingTrace:
    """Random ones for the same tokens."""
    drawn = synthetic_trace(trace.spec, trace.lengths.tolist(), seed=seed, complete=True)
    return replace(drawn, token_ids_N=trace.token_ids_N)


def _as_map(trace: RoutingTrace, layer: int) -> NDArray[np.bool_]:
    """Bool [N, E], one layer's picks."""
    ids_NK = trace.expert_ids_NLK[:, layer]
    map_NE = np.zeros((len(ids_NK), trace.spec.num_experts), np.bool_)
    np.put_along_axis(map_NE, ids_NK.astype(np.int64), True, axis=1)
    return map_NE


@contextmanager
def _picks(bench: Bench) -> Iterator[list[list[NDArray[np.bool_]]]]:
    """By routed layer, what its router picks in each of its runs: bool [N, E], tokens of a sequence together."""
    picked: list[list[NDArray[np.bool_]]] = [[] for _ in bench.routed.router_paths]
    with ExitStack() as stack:
        for maps, path in zip(picked, bench.routed.router_paths, strict=True):

            def keep(module: Any, given: Any, result: Any, maps: list[NDArray[np.bool_]] = maps) -> None:
                map_TBE = result[1].detach().view(-1, SEQUENCES, result[1].shape[-1])
                maps.append(map_TBE.transpose(0, 1).flatten(0, 1).cpu().numpy())

            stack.callback(bench.model.get_submodule(path).register_forward_hook(keep).remove)
        yield picked


def _bits_of(bench: Bench, run: Callable[[], Losses]) -> dict[str, Tensor]:
    """Losses and gradients of a step."""
    found = {f"losses of micro-batch {m}": losses["losses"].clone() for m, losses in enumerate(run())}
    grads = {name: each.grad.clone() for name, each in bench.model.named_parameters() if each.grad is not None}
    return found | grads


def _differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in one if name not in other or not torch.equal(one[name], other[name])]


def _cost(part: Part) -> None:
    with part.check("step timed"):
        sizes, width = (LARGE, LARGE_WIDTH) if part.full else (SMALL, 32)
        bench = Bench.of(sizes, part.device, width)
        pairs = PAIRS if part.full else FEW_PAIRS
        candidates: dict[str, Callable[[], object]] = {
            "step": bench.replayed(),
            "step_with_telemetry": bench.replayed(telemetry=True),
            "step_a_over_a": partial(bench.native),
        }
        for name, candidate in candidates.items():
            ratio = compare(partial(part.timed, candidate), partial(part.timed, bench.native), pairs=pairs)
            part.record(**{f"{name}_ratio": round(ratio.ratio, 4)})
            part.record(**{f"{name}_ratio_quartiles": [round(ratio.low, 4), round(ratio.high, 4)]})
            part.record(native_step_ms=round(ratio.baseline_ms, 2))
        part.record(
            step_with_telemetry_ratio_aim="<= 1.005",
            tokens_of_step=MICRO_BATCHES * SEQUENCES * width,
            layers=SIZES["num_layers"],
        )
        del bench
        gc.collect()
        if part.device.type == "cuda":
            torch.cuda.empty_cache()
