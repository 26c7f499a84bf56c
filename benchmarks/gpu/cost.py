"""What replay and recording cost over the unpatched model: time, memory, kernels, and waits of the host.

The unpatched side is the same model outside of any session. The two sides run in turn; an A/A line (unpatched over
unpatched) says how far apart two equal things measure. A session is opened anew for each forward, and for the forward
and backward of each step; `of_rows` names those whose routes were made ready before, as one micro-batch's are for its
recompute, its update and every epoch. Each call is waited for, so that work of the host which a queue of kernels would
hide counts in full; the figures named `in_a_row` wait once for four micro-batches, as gradient accumulation does.

The model has no vocabulary to speak of: an output head would take much of the time, and make every ratio look better.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Decoding
from benchmarks.gpu.counting import profiled
from benchmarks.gpu.layers import (
    LAYER_BYTES,
    SMALL_LAYER,
    TRUE_LAYER,
    free_memory,
    layered_model,
    layers_that_fit,
    random_tokens,
)
from benchmarks.gpu.part import Part, Skipped
from benchmarks.gpu.waits import measure_waits
from benchmarks.harness.pairs import compare
from foreroute.adapters import hf

VOCABULARY = 4096
SMALL_VOCABULARY = 256
AIMS = {
    "step_of_rows_ratio": "<= 1.005",
    "step_of_rows_in_a_row_ratio": "<= 1.005",
    "forward_of_rows_ratio": "<= 1.01",
    "decode_recording_ratio": "<= 1.01",
}
IN_A_ROW = 4
ACTIVATION_BYTES = 2.5e9
"""Of one layer at 8,192 tokens, for the backward."""
SPARE_BYTES = 6e9
MOST_LAYERS = 8


def run(part: Part) -> None:
    """See the module."""
    num_layers = 2
    if part.full:
        num_layers = layers_that_fit(part.device, 2 * LAYER_BYTES + ACTIVATION_BYTES, SPARE_BYTES, MOST_LAYERS)
    vocabulary, shape = (VOCABULARY, (4, 2048)) if part.full else (SMALL_VOCABULARY, (2, 32))
    model = layered_model(part.device, num_layers, vocabulary, TRUE_LAYER if part.full else SMALL_LAYER)
    bench = Bench.of(hf.attach(model), random_tokens(part.device, vocabulary, shape))
    part.record(layers=num_layers, tokens=bench.batch.numel(), **{f"{name}_aim": aim for name, aim in AIMS.items()})
    with part.check("forward"):
        _ratio(part, "forward", bench.replayed(bench.forward), bench.forward)
        _ratio(part, "forward_a_over_a", lambda: bench.forward(), bench.forward)
        _ratio(part, "forward_of_rows", bench.replayed_rows(bench.forward), bench.forward)
    with part.check("forward and backward"):
        _ratio(part, "step", bench.replayed(bench.step), bench.step)
        _ratio(part, "step_a_over_a", lambda: bench.step(), bench.step)
        _ratio(part, "step_of_rows", bench.replayed_rows(bench.step), bench.step)
        _ratio(part, "step_in_a_row", _often(bench.replayed(bench.step)), _often(bench.step))
        _ratio(part, "step_of_rows_in_a_row", _often(bench.replayed_rows(bench.step)), _often(bench.step))
        _ratio(part, "step_recording", bench.recorded(bench.step), bench.step)
    model.zero_grad(set_to_none=True)
    with part.check("prefill"):
        _ratio(part, "prefill_recording", bench.recorded(bench.prefill), bench.prefill)
        _ratio(part, "prefill_recording_margins", bench.recorded(bench.prefill, margins=True), bench.prefill)
    decoding = None
    with part.check("decode"):
        decoding = Decoding.begin(bench.routed, vocabulary, (64, 512) if part.full else (4, 8), 16 if part.full else 2)
        _decode(part, decoding)
    with part.check("host synchronisations"):
        measure_waits(part, bench, decoding)
    with part.check("memory"):
        _memory(part, bench)
    with part.check("kernels, and a profile"):
        _profile(part, bench, decoding)


def _ratio(part: Part, name: str, candidate: Callable[[], object], baseline: Callable[[], object]) -> None:
    """Over interleaved pairs, as many as fit a few seconds."""

    def clock() -> float:
        part.synchronize()
        return time.perf_counter() if part.full else time.thread_time()

    candidate()
    baseline()
    both = part.timed(candidate) + part.timed(baseline)
    most, seconds = (40, min(3.0, part.seconds_left / 15)) if part.full else (3, 0.2)
    found = compare(candidate, baseline, pairs=max(2, min(most, int(seconds / both))), clock=clock)
    figures: dict[str, Any] = {
        f"{name}_ratio": round(found.ratio, 4),
        f"{name}_ratio_quartiles": [round(found.low, 4), round(found.high, 4)],
        f"{name}_unpatched_ms": round(found.baseline_ms, 3),
    }
    part.record(**figures)


def _often(work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(IN_A_ROW):
            work()

    return run


def _decode(part: Part, decoding: Decoding) -> None:
    _ratio(part, "decode_recording", decoding.recorded(), decoding.steps)
    _ratio(part, "decode_a_over_a", lambda: decoding.steps(), decoding.steps)
    _ratio(part, "decode_recording_and_trace", decoding.recorded(read=True), decoding.steps)
    figures: Any = part.figures
    added_ms = (figures["decode_recording_ratio"] - 1) * figures["decode_recording_unpatched_ms"]
    per_layer = added_ms * 1e3 / decoding.num_steps / figures["layers"]
    part.record(decode_sequences=len(decoding.first), decode_recording_added_per_layer_us=round(per_layer, 2))


def _memory(part: Part, bench: Bench) -> None:
    """Peak of each over that of the unpatched model, which holds the weights too."""
    if part.device.type != "cuda":
        raise Skipped("only on CUDA is it known what was allocated")

    def peak(work: Callable[[], object]) -> int:
        bench.routed.model.zero_grad(set_to_none=True)
        free_memory(part.device)
        torch.cuda.reset_peak_memory_stats(part.device)
        work()
        part.synchronize()
        return torch.cuda.max_memory_allocated(part.device)

    kinds: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "forward": (bench.replayed(bench.forward), bench.forward),
        "forward_without_telemetry": (bench.replayed(bench.forward, telemetry=False), bench.forward),
        "forward_recording": (bench.recorded(bench.forward), bench.forward),
        "step": (bench.replayed(bench.step), bench.step),
    }
    for name, (candidate, baseline) in kinds.items():
        unpatched = peak(baseline)
        added = peak(candidate) - unpatched
        part.record(
            **{
                f"{name}_peak_memory_added_mb": round(added / 1e6, 2),
                f"{name}_peak_memory_ratio": round(1 + added / unpatched, 5),
                f"{name}_unpatched_peak_memory_gb": round(unpatched / 1e9, 2),
            }
        )
    bench.routed.model.zero_grad(set_to_none=True)


def _profile(part: Part, bench: Bench, decoding: Decoding | None) -> None:
    """Kernels that each adds; the tables go beside the part's file, to explain what falls short."""
    works: dict[str, Callable[[], object]] = {
        "unpatched": bench.forward,
        "replay": bench.replayed(bench.forward),
        "replay_without_telemetry": bench.replayed(bench.forward, telemetry=False),
        "recording": bench.recorded(bench.forward),
    }
    if decoding is not None:
        works |= {"decode": decoding.steps, "decode_recording": decoding.recorded()}
    if not part.full:
        works = {name: works[name] for name in ("unpatched", "replay")}
    text, kernels = [], {}
    for name, work in works.items():
        kernels[name], tables = profiled(work, part.device)
        text.append(f"== {name}: {kernels[name]} kernels\n{tables}")
    part.file.with_name("cost_profile.txt").write_text("\n".join(text), encoding="utf-8")
    if part.device.type != "cuda":
        return
    if not kernels["unpatched"]:
        raise Skipped("the profiler saw no kernel of the device; cost_profile.txt has the host's side")
    part.record(kernels_unpatched=kernels["unpatched"])
    for name in ("replay", "replay_without_telemetry", "recording"):
        part.record(**{f"kernels_added_by_{name}": kernels[name] - kernels["unpatched"]})
