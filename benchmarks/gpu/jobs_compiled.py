"""`torch.compile` with CUDA graphs of its own."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.gpu.bits import Case
from benchmarks.gpu.driving import Batch, distance, foreign_routes, logits_of, step
from benchmarks.gpu.families import build
from benchmarks.gpu.part import Part, Skipped
from foreroute.adapters import hf

FAMILY = "qwen3_moe"
NEEDS_S = 25
"""A compilation that has less left is not begun."""


def check_reduced_overhead(part: Part, case: Case) -> None:
    """Graphs that torch captures and replays by itself take the routes of every pass; notes of a pass stay its own."""
    _check(part, case, "torch.compile(reduce-overhead)/inference", _forwards)
    part.record(
        reduce_overhead_skips=counters["inductor"].get("cudagraph_skips", 0),
        reduce_overhead_partitions=counters["inductor"].get("cudagraph_partitions", 0),
    )


def check_reduced_overhead_in_training(part: Part, case: Case) -> None:
    """The same, with the graphs of backward."""
    _check(part, case, "torch.compile(reduce-overhead)/training", _steps)


def _check(part: Part, case: Case, name: str, compare: Any) -> None:
    with part.check(name):
        if part.device.type != "cuda" or importlib.util.find_spec("triton") is None:
            raise Skipped("it takes a GPU and triton")
        if part.seconds_left < NEEDS_S:
            raise Skipped(f"{part.seconds_left:.0f} s were left; it takes {NEEDS_S} s")
        torch._dynamo.reset()
        model = build(FAMILY, part.device, torch.bfloat16, full=part.full, experts="grouped_mm", num_hidden_layers=2)
        routed = hf.attach(model)
        compare(routed, torch.compile(model, mode="reduce-overhead", fullgraph=True), case.batch)
    torch._dynamo.reset()


def _forwards(routed: hf.RoutedTransformer, compiled: Any, batch: Batch) -> None:
    """Sessions one after the other, each of several passes: one warms up, one is captured, one is replayed."""
    for seed in (1, 2):
        trace = foreign_routes(routed, batch, seed)
        with routed.replay(trace):
            expected = logits_of(routed.model, batch)
        with routed.replay(trace), routed.record() as recording:
            seen = [logits_of(compiled, batch).clone() for _ in range(4)]
        for number, logits in enumerate(seen):
            apart = distance(logits, expected)
            assert apart < 5e-2, f"session {seed}, pass {number}: logits are {apart:.2g} from the eager model's"
        executed = recording.trace()
        for number in range(len(seen)):
            rows = range(number * len(trace), (number + 1) * len(trace))
            assert executed.select(list(rows)).equals(trace), f"session {seed}, pass {number}: other routes recorded"
        assert distance(logits_of(routed.model, batch), expected) > 0.1, "native logits are as near"


def _steps(routed: hf.RoutedTransformer, compiled: Any, batch: Batch) -> None:
    """Training steps, each in a session of its own with routes of its own."""
    for seed in (1, 2, 3, 4):
        trace = foreign_routes(routed, batch, seed)
        with routed.replay(trace):
            expected = step(routed.model, batch)
        torch.compiler.cudagraph_mark_step_begin()
        with routed.replay(trace, telemetry=True) as session:
            seen = step(compiled, batch)
            shared = session.agreement().routing.overlap_L.mean()
        apart = distance(seen["logits"], expected["logits"])
        assert apart < 5e-2, f"step {seed}: logits are {apart:.2g} from the eager model's"
        routers = [name for name in expected if name.endswith("gate.weight")]
        for name in routers:
            apart = distance(seen[name], expected[name])
            assert apart < 0.2, f"step {seed}: the gradient of {name} is {apart:.2g} from the eager model's"
        assert 0 < shared < 1, f"step {seed}: telemetry says that {shared:.2f} of picks are the routers' own"
