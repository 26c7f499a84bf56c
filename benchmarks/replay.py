"""What replay costs: time of a forward, and of forward plus backward, replayed over unpatched.

The two run in turn on one model with the same weights and batch. The unpatched side is the same model outside any
session, which is bit for bit the model that was never attached. An A/A line (unpatched over unpatched) says how far
apart two equal things measure on this machine. Times are CPU time of the one thread that works.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.pairs import PairedRatio, compare
from foreroute.adapters import hf
from foreroute.trace import RoutingTrace

VOCABULARY = 1024
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "initializer_range": 0.05,
}
TOKENS = (2, 128)


def run(*, quick: bool) -> dict[str, Any]:
    """Medians and quartiles over interleaved pairs."""
    torch.set_num_threads(1)
    model = hf.build_model("qwen3_moe", seed=0, **SIZES)
    routed = hf.attach(model)
    batch = torch.randint(0, VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(0))
    with routed.record() as recording, torch.no_grad():
        model(input_ids=batch)
    trace = recording.trace()
    few, many = (20, 50) if quick else (100, 250)

    def ratio(candidate: Callable[[], object], baseline: Callable[[], object], pairs: int) -> PairedRatio:
        return compare(candidate, baseline, pairs=pairs, clock=time.thread_time)

    forward = _forward(model, batch)
    step = _step(model, batch)
    figures = {
        "forward": ratio(_replayed(routed, trace, forward), forward, many),
        "forward_recording": ratio(_recording(routed, forward), forward, many),
        "step": ratio(_replayed(routed, trace, step), step, few),
        "forward_a_over_a": ratio(_forward(model, batch), forward, many),
        "step_a_over_a": ratio(_step(model, batch), step, few),
    }
    return {
        "metrics": {f"{name}_ratio": round(figure.ratio, 4) for name, figure in figures.items()}
        | {f"{name}_quartiles": _quartiles(figure) for name, figure in figures.items()},
        "baselines": {name: asdict(figures[name]) for name in ("forward_a_over_a", "step_a_over_a")},
        "setting": {"family": "qwen3_moe", **SIZES, "tokens": TOKENS, "pairs": [many, few], "experts": "grouped_mm"},
    }


def _forward(model: Any, batch: torch.Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return model(input_ids=batch, use_cache=False).logits

    return run


def _step(model: Any, batch: torch.Tensor) -> Callable[[], object]:
    def run() -> object:
        model.zero_grad(set_to_none=True)
        return model(input_ids=batch, use_cache=False).logits.float().log_softmax(-1)[..., 0].mean().backward()

    return run


def _replayed(routed: hf.RoutedModel, trace: RoutingTrace, work: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with routed.replay(trace):
            return work()

    return run


def _recording(routed: hf.RoutedModel, work: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with routed.record():
            return work()

    return run


def _quartiles(figure: PairedRatio) -> list[float]:
    return [round(figure.low, 4), round(figure.high, 4)]
