"""Costs of replay and recording over the unpatched model: time, memory, kernels, and waits of the host.

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
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.counting import waits_are_seen, waits_on_cuda
from benchmarks.gpu.figures import Figures
from benchmarks.gpu.layers import (
    LAYER_BYTES,
    SMALL_LAYER,
    TRUE_LAYER,
    free_memory,
    layered_model,
    layers_that_fit,
    random_tokens,
)
from benchmarks.harness.models import run_model
from benchmarks.harness.pairs import compare
from foreroute.adapters import hf
from foreroute.core.caches import named_cache

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
Work = Callable[[], object]


def run(figures: Figures) -> None:
    """Measure all of them."""
    num_layers = 2
    if figures.full:
        num_layers = layers_that_fit(figures.device, 2 * LAYER_BYTES + ACTIVATION_BYTES, SPARE_BYTES, MOST_LAYERS)
    vocabulary, shape = (VOCABULARY, (4, 2048)) if figures.full else (SMALL_VOCABULARY, (2, 32))
    model = layered_model(figures.device, num_layers, vocabulary, TRUE_LAYER if figures.full else SMALL_LAYER)
    routed = hf.attach(model)
    batch = random_tokens(figures.device, vocabulary, shape)
    with routed.record() as recording, torch.no_grad():
        model(input_ids=batch, use_cache=False)
    trace = recording.trace()
    rows = routed.rows(trace)
    figures.record(layers=num_layers, tokens=batch.numel(), **{f"{name}_aim": aim for name, aim in AIMS.items()})

    def forward(**arguments: Any) -> None:
        with torch.no_grad():
            model(input_ids=batch, use_cache=False, **arguments)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        run_model(model, batch)

    def in_session(opened: Callable[[], Any], work: Work) -> Work:
        def inside() -> None:
            with opened():
                work()

        return inside

    replayed = partial(in_session, partial(routed.replay, trace, telemetry=True))
    without_telemetry = partial(in_session, partial(routed.replay, trace))
    of_rows = partial(in_session, partial(routed.replay, rows))
    recorded = partial(in_session, routed.record)
    ratio = partial(_ratio, figures)
    ratio("forward", replayed(forward), forward)
    ratio("forward_a_over_a", partial(forward), forward)
    ratio("forward_of_rows", of_rows(forward), forward)
    ratio("step", replayed(step), step)
    ratio("step_a_over_a", partial(step), step)
    ratio("step_of_rows", of_rows(step), step)
    ratio("step_in_a_row", _often(replayed(step)), _often(step))
    ratio("step_of_rows_in_a_row", _often(of_rows(step)), _often(step))
    ratio("step_recording", recorded(step), step)
    # gradients of the steps would count as memory of what follows
    model.zero_grad(set_to_none=True)
    decode = _decoding(figures, model, vocabulary)
    ratio("decode_recording", recorded(decode), decode)
    ratio("decode_a_over_a", partial(decode), decode)
    if figures.device.type != "cuda":
        return  # it alone knows its memory, its kernels and its waits
    _memory(figures, model, {"forward": (replayed(forward), forward), "step": (replayed(step), step)})
    _kernels(
        figures,
        forward,
        {
            "replay": replayed(forward),
            "replay_without_telemetry": without_telemetry(forward),
            "recording": recorded(forward),
        },
    )
    padded = partial(forward, attention_mask=torch.ones_like(batch))
    _waits(
        figures,
        {
            "replay": (replayed(forward), forward),
            "replay_without_telemetry": (without_telemetry(forward), forward),
            "replay_with_mask": (replayed(padded), padded),
            "recording": (recorded(forward), forward),
            "recording_of_decode_steps": (recorded(decode), decode),
        },
    )


def _ratio(figures: Figures, name: str, candidate: Work, baseline: Work) -> None:
    """Measure interleaved pairs, as many as fit a few seconds."""

    def clock() -> float:
        figures.synchronize()
        return time.perf_counter() if figures.full else time.thread_time()

    # what compiles or allocates once must not set how many pairs there is time for
    candidate()
    baseline()
    both = figures.timed(candidate) + figures.timed(baseline)
    most, seconds = (40, min(3.0, figures.seconds_left / 15)) if figures.full else (3, 0.2)
    found = compare(candidate, baseline, pairs=max(2, min(most, int(seconds / both))), clock=clock)
    figures.record_ratio(name, found)
    figures.record(**{f"{name}_unpatched_ms": round(found.baseline_ms, 3)})


def _often(work: Work) -> Work:
    def run() -> None:
        for _ in range(IN_A_ROW):
            work()

    return run


def _decoding(figures: Figures, model: Any, vocabulary: int) -> Work:
    """A few steps of decoding from prompts in the cache."""
    shape, num_steps = ((64, 512), 16) if figures.full else ((4, 8), 2)
    figures.record(decode_sequences=shape[0])
    prompts = random_tokens(figures.device, vocabulary, shape)
    with torch.no_grad():
        output = model(input_ids=prompts, use_cache=True, logits_to_keep=1)
    caches, first = named_cache(output), output.logits[:, -1].argmax(-1, keepdim=True)
    mask = prompts.new_ones(shape[0], shape[1] + num_steps)

    def decode() -> None:
        """Ask after each token whether every sequence has ended, and take the cache back to the prompts."""
        token = first
        with torch.no_grad():
            for step in range(num_steps):
                logits = model(
                    input_ids=token, attention_mask=mask[:, : shape[1] + step + 1], **caches, use_cache=True
                ).logits
                token = logits[:, -1].argmax(-1, keepdim=True)
                bool((token < 0).all())
        # each call finds the cache as the first did
        for cache in caches.values():
            cache.crop(-num_steps)

    return decode


def _waits(figures: Figures, pairs: dict[str, tuple[Work, Work]]) -> None:
    """Count waits of the host in a session, beyond those of the unpatched work; raise `AssertionError` for one."""
    # only a GPU is waited for; `python -m benchmarks replay` counts on a device that stands in for one
    if not waits_are_seen(figures.device):
        return
    own: list[str] = []
    most = 0
    for name, (candidate, baseline) in pairs.items():
        whole, without = waits_on_cuda(candidate), waits_on_cuda(baseline)
        own += dict.fromkeys(f"{name}: {place}" for place in whole if place.startswith("foreroute/"))
        figures.record(**{f"syncs_added_by_{name}": len(whole) - len(without)})
        most = max(most, len(whole) - len(without))
    figures.record(syncs_added_by_replay_aim="<= 0", syncs_of_foreroute=own)
    if most > 0:
        raise AssertionError(f"a session adds {most} waits of the host; foreroute's own are at {own}")


def _memory(figures: Figures, model: Any, pairs: dict[str, tuple[Work, Work]]) -> None:
    """Peak of each over that of the unpatched model, which holds the weights too."""

    def peak(work: Work) -> int:
        model.zero_grad(set_to_none=True)
        free_memory(figures.device)
        torch.cuda.reset_peak_memory_stats(figures.device)
        work()
        figures.synchronize()
        return torch.cuda.max_memory_allocated(figures.device)

    for name, (candidate, baseline) in pairs.items():
        unpatched = peak(baseline)
        added = peak(candidate) - unpatched
        figures.record(
            **{
                f"{name}_peak_memory_added_mb": round(added / 1e6, 2),
                f"{name}_peak_memory_ratio": round(1 + added / unpatched, 5),
                f"{name}_unpatched_peak_memory_gb": round(unpatched / 1e9, 2),
            }
        )
    model.zero_grad(set_to_none=True)


def _kernels(figures: Figures, baseline: Work, candidates: dict[str, Work]) -> None:
    """Count the kernels that each adds."""
    unpatched = _launched(baseline)
    if not unpatched:
        figures.record(kernels_reason="the profiler saw no kernel of the device")
        return
    figures.record(kernels_unpatched=unpatched)
    for name, candidate in candidates.items():
        figures.record(**{f"kernels_added_by_{name}": _launched(candidate) - unpatched})


def _launched(work: Work) -> int:
    """Kernels of one call."""
    work()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    of_device = (event for event in profiler.events() or [] if event.device_type.name == "CUDA")
    return sum(not event.name.startswith(("Memcpy", "Memset", "gpu_")) for event in of_device)
