"""Peaks of memory that were forecast, against those that a counter of every allocation of the process sees.

Two gloo ranks train a small Qwen3-MoE. What it takes is measured on a few small micro-batches of a model of three
layers, and forecast for larger ones of other seeds, of four and six layers. The counter (heap.cpp) stands in front of
the allocator, and knows nothing of torch.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.harness.models import Sizes, spread_model
from benchmarks.harness.spread_bench import LINKS, PATIENCE_S
from foreroute import planner
from foreroute.adapters import hf
from foreroute.adapters.hf.memory import draw_micro_batches, measure_memory
from foreroute.adapters.hf.response_logprobs import pad
from foreroute.costs.memory import BatchSizes, StepMemory
from foreroute.plan import PlanOptions, StepPlan, Topology, known_rows
from foreroute.plan.received_rows import KnownRows
from foreroute.testing.ranks import Workers
from foreroute.trace import RoutingTrace

SIZES = Sizes(256, 4, 2, experts=16, top_k=4, expert_width=128, vocabulary=1000, head_width=64)
LAYERS = (4, 6)
SLOTS = 2
FLAGS = (
    "-std=c++20 -O2 -fno-exceptions -fno-rtti -nostdlib++ -shared -fPIC -fvisibility=hidden -s -Wall -Wextra -Werror"
)


def peak_cases(micro_steps: int, *, quick: bool = False) -> list[dict[str, Any]]:
    """Forecast and count the peaks of as many micro-steps at homes and as many under plans, of every setting."""
    with tempfile.TemporaryDirectory() as folder:
        heap = Path(folder, "heap.so")
        source = Path(__file__).with_name("heap.cpp")
        subprocess.run([sys.executable, "-m", "ziglang", "c++", *FLAGS.split(), "-o", heap, source], check=True)
        with (
            patch.dict(os.environ, LD_PRELOAD=str(heap)),
            # started anew: what is forked has the allocator of its parent
            closing(Workers(2, timeout_s=PATIENCE_S, forked_from=None)) as workers,
        ):
            settings, layers = ((False,), LAYERS[:1]) if quick else ((False, True), LAYERS)
            by_rank = [found for each in settings for found in workers.run(_cases, micro_steps, each, layers)]
            return [case for found in by_rank for case in found]


def _cases(rank: int, micro_steps: int, checkpointed: bool, layers: tuple[int, ...]) -> list[dict[str, Any]]:
    memory = _measured(checkpointed)
    models = [with_layers(memory, num_layers) for num_layers in layers]
    return [case for each in models for case in _compared(rank, each, micro_steps, checkpointed)]


def _measured(checkpointed: bool) -> StepMemory:
    routed = hf.attach(spread_model(SIZES._replace(layers=3), recomputes=checkpointed))
    traces = draw_micro_batches(routed.spec, SIZES.vocabulary)
    targets_M = [len(trace) * int(trace.lengths.max()) for trace in traces]
    return measure_memory(routed, traces, targets_M, lambda number: _loss(routed.model, traces[number]))


def with_layers(memory: StepMemory, num_layers: int) -> StepMemory:
    """Give what a model of more layers takes, each like the one in the middle of the three that were measured."""
    sections = []
    for section in memory.sections:
        if section.layer == 1:
            inner = range(1, num_layers - 1)
            sections += [section._replace(layer=n) for n in (inner if section.part == "forward" else reversed(inner))]
        else:
            sections.append(section._replace(layer=num_layers - 1) if section.layer == 2 else section)
    return replace(memory, sections=sections)


def _loss(model: Any, trace: RoutingTrace) -> Tensor:
    ids, mask = map(torch.from_numpy, pad(trace))
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def _compared(rank: int, memory: StepMemory, micro_steps: int, checkpointed: bool) -> list[dict[str, Any]]:
    sizes = SIZES._replace(layers=memory.num_layers)
    routed = hf.attach(spread_model(sizes, recomputes=checkpointed))
    traces = [_drawn(routed.spec, np.random.default_rng([7, rank, sizes.layers, m]), m % 3) for m in range(micro_steps)]
    rows_M = [routed.rows(trace) for trace in traces]
    counts_MLGE = routed.gather_counts(rows_M)
    own_M3 = np.array([len(t) * np.array([w := t.lengths.max(), w * w, w]) for t in traces])
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, own_M3)
    batches = BatchSizes(*np.stack(parts, axis=2).transpose(1, 0, 2))
    topology = Topology(2, 2, SLOTS, LINKS)
    found = []
    for plan in (None, planner.plan(counts_MLGE, topology, PlanOptions(), home_LE=routed.home_LE)):
        known = known_rows(counts_MLGE, routed.home_LE if plan is None else plan, top_k=sizes.top_k)
        for _ in range(2):  # the first makes gradients, and what stays
            peaks_M = _peaks(routed, traces, rows_M, counts_MLGE, plan)
        ways = _ways(memory, known, batches, plan)
        found += [
            {
                "way": "homes" if plan is None else "plans",
                "layers": sizes.layers,
                "checkpointed": checkpointed,
                "tokens": int(batches.tokens[m, rank]),
                "measured": peaks_M[m],
                **{name: int(bytes_MG[m, rank]) for name, bytes_MG in ways.items()},
            }
            for m in range(micro_steps)
        ]
    return found


def _ways(memory: StepMemory, known: KnownRows, batches: BatchSizes, plan: StepPlan | None) -> dict[str, Any]:
    """Forecast, and forecast without the rows that each rank has, and without slots."""
    level = known.rows_MLG.mean(axis=2, keepdims=True).astype(np.int64)
    levelled = replace(
        known, rows_MLG=np.broadcast_to(level, known.rows_MLG.shape), replica_rows_MLG=0 * known.rows_MLG
    )
    return {
        "forecast": memory.forecast(known, batches, plan).bytes_MG,
        "without_rows": memory.forecast(levelled, batches, plan).bytes_MG,
        "without_slots": memory.forecast(known, batches).bytes_MG,
    }


def _peaks(routed: Any, traces: Any, rows_M: Any, counts_MLGE: Any, plan: StepPlan | None) -> list[int]:
    heap = ctypes.CDLL(None)
    heap.heap_used.restype = heap.heap_most.restype = ctypes.c_long
    peaks = []
    gc.collect()
    with routed.execute(plan, counts_MLGE, rows_M):
        before = heap.heap_used()
        for trace, rows in zip(traces, rows_M, strict=True):
            dist.barrier()
            heap.heap_begin()
            with routed.replay(rows):
                _loss(routed.model, trace).backward()
            peaks.append(heap.heap_most() - before)
    return peaks


def _drawn(spec: Any, rng: np.random.Generator, skew: float) -> RoutingTrace:
    """Draw three sequences of unlike lengths, and routes that favour experts of each layer the more, the more skew."""
    lengths = rng.integers(60, 400, 3)
    favour_LE = skew * rng.standard_normal((spec.num_layers, spec.num_experts))
    scores = [favour_LE + rng.gumbel(size=(n, spec.num_layers, spec.num_experts)) for n in lengths]
    ids = [np.argsort(-score, axis=-1)[..., : spec.top_k] for score in scores]
    return RoutingTrace.from_sequences(spec, [rng.integers(SIZES.vocabulary, size=n) for n in lengths], ids)
