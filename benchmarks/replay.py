"""Costs of replay: time of a forward, and of forward plus backward, over the unpatched model's.

The two run in turn on one model with the same weights and batch, for every implementation of the experts, eager and
compiled. The unpatched side is the same model outside any session, which is bit for bit the model that was never
attached. An A/A line (unpatched over unpatched) says how far apart two equal things measure on this machine. Times are
CPU time of the one thread that works. A time that the run does not resolve is None (`harness.pairs`). Waits of the host
and operators that replay adds are counted by tests/adapters/hf/test_host_waits.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.harness.models import Sizes, keep_memory, run_model
from benchmarks.harness.pairs import PairedRatio, compare, near_one
from foreroute.adapters import hf
from foreroute.core.passes import Pass, RecordOptions
from foreroute.replay import Policy, TraceOnDevice
from foreroute.trace import RoutingTrace

SIZES = Sizes(hidden=1024, heads=16, kv_heads=2, experts=32, top_k=8, expert_width=384, vocabulary=1024)
"""Layers of half the width of Qwen3-30B-A3B, with a quarter of its experts."""
SMALLER = SIZES._replace(layers=1, experts=16)
SETTINGS: dict[str, tuple[Sizes, tuple[int, int]]] = {
    "grouped_mm": (SIZES, (2, 128)),
    "eager": (SMALLER, (2, 128)),
    "batched_mm": (SMALLER, (1, 16)),
}
"""Sizes and batch by implementation of the experts. The backward of eager fills the gradient of every expert once for
each of them; batched_mm copies the weights of every pick."""

TELEMETRY = {"": False, "_with_telemetry": True}
"""Whether routers also select by themselves, by what the names of such figures end in."""


@dataclass(frozen=True)
class Bench:
    """One model, or what `torch.compile` made of it, and one batch, recorded."""

    routed: hf.RoutedTransformer
    call: Any
    batch: torch.Tensor
    trace: RoutingTrace

    @classmethod
    def of(cls, experts: str, compiler: str | None = None) -> Bench:
        """Build a model with these experts, eager or compiled by this backend."""
        torch.compiler.reset()
        sizes, shape = SETTINGS[experts]
        model = hf.build_model("qwen3_moe", seed=0, experts_implementation=experts, **sizes.of_hf())
        routed = hf.attach(model)
        batch = torch.randint(0, sizes.vocabulary, shape, generator=torch.Generator().manual_seed(0))
        with routed.record() as recording, torch.no_grad():
            model(input_ids=batch)
        call = model if compiler is None else torch.compile(model, backend=compiler, fullgraph=True)
        return cls(routed, call, batch, recording.trace())

    def forward(self) -> object:
        """Run a forward without gradients."""
        with torch.no_grad():
            return self.call(input_ids=self.batch, use_cache=False).logits

    def step(self) -> None:
        """Run forward and backward."""
        self.routed.model.zero_grad(set_to_none=True)
        run_model(self.call, self.batch)

    def replayed(self, work: Callable[[], object], *, telemetry: bool = True) -> Callable[[], object]:
        """Wrap the work in a session of its own."""

        def run() -> object:
            with self.routed.replay(self.trace, telemetry=telemetry):
                return work()

        return run

    def recording(self) -> object:
        """A forward that is recorded."""
        with self.routed.record():
            return self.forward()


def run(*, quick: bool) -> dict[str, Any]:
    """Medians and quartiles over interleaved pairs."""
    torch.set_num_threads(1)
    keep_memory()
    few, many = (2, 4) if quick else (40, 80)  # quick resolves no time
    compiler = "aot_eager" if quick else "inductor"
    ratio = partial(compare, clock=time.thread_time)
    eager = Bench.of("grouped_mm")
    figures = {
        "forward_recording": ratio(eager.recording, eager.forward, pairs=many),
        "forward_a_over_a": ratio(lambda: eager.forward(), eager.forward, pairs=many),
        "step_a_over_a": ratio(lambda: eager.step(), eager.step, pairs=few),
    }
    by_implementation = {"grouped_mm": _forwards(eager, many, ratio) | _steps(eager, few, ratio)}
    for implementation in ("eager", "batched_mm"):
        bench = Bench.of(implementation)
        by_implementation[implementation] = _forwards(bench, many // 2, ratio) | _steps(bench, max(few // 2, 2), ratio)
    by_implementation["compiled"] = _steps(Bench.of("grouped_mm", compiler), max(few // 2, 2), ratio)
    metrics: dict[str, Any] = {}
    for name, figure in (figures | by_implementation["grouped_mm"]).items():
        metrics |= near_one(name, figure)
    for name, found in by_implementation.items():
        metrics[name] = {key: value for each, figure in found.items() for key, value in near_one(each, figure).items()}
    return {
        "metrics": metrics | _bytes_per_token(eager),
        "baselines": {name: figures[name].shown() for name in ("forward_a_over_a", "step_a_over_a")},
        "setting": {
            "family": "qwen3_moe",
            "sizes_and_tokens": {name: (sizes._asdict(), shape) for name, (sizes, shape) in SETTINGS.items()},
            "pairs": [many, few],
            "compiler": compiler,
        },
    }


def _forwards(bench: Bench, pairs: int, ratio: Callable[..., PairedRatio]) -> dict[str, PairedRatio]:
    return {
        f"forward{end}": ratio(bench.replayed(bench.forward, telemetry=telemetry), bench.forward, pairs=pairs)
        for end, telemetry in TELEMETRY.items()
    }


def _steps(bench: Bench, pairs: int, ratio: Callable[..., PairedRatio]) -> dict[str, PairedRatio]:
    return {
        f"step{end}": ratio(bench.replayed(bench.step, telemetry=telemetry), bench.step, pairs=pairs)
        for end, telemetry in TELEMETRY.items()
    }


def _bytes_per_token(bench: Bench) -> dict[str, float]:
    """Weigh all layers: the trace on the host, routes on the device until backward."""
    trace, device = bench.trace, torch.device("cpu")
    policy = Policy("error", "native", "native", telemetry=False)
    rows = TraceOnDevice(trace, device).gather(torch.arange(trace.num_rows), policy)
    queued = [rows.ids_LRK, rows.real_R, rows.counted_R]
    current = Pass(bench.routed.routers, trace.num_rows, rows.ids_LRK.dtype, device, rows, RecordOptions(native=True))
    queued += [current.native_LRK, *(each for layer in current.parts() for each in (layer.ids_RK, layer.absent_R1))]
    host = [trace.expert_ids_NLK, trace.valid_N, trace.token_ids_N, trace.weight_versions_N]
    parts = {
        "host": sum(array.nbytes for array in host),
        "device": sum(tensor.nbytes for tensor in queued),
    }
    figures = {f"bytes_per_token_{name}": round(size / trace.num_rows, 2) for name, size in parts.items()}
    return {"bytes_per_token": round(sum(figures.values()), 2), **figures}
