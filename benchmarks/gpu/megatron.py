"""Time of a step in Megatron-Core's own schedule with replay over one without, in a world of one rank.

The models are those of `benchmarks/megatron.py`, without Transformer Engine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.figures import Figures
from benchmarks.harness.models import start_megatron
from benchmarks.harness.pairs import compare
from benchmarks.megatron import MICRO_BATCHES, SEQUENCES, SIZES, Bench

SMALL = SIZES._replace(hidden=128, heads=4, expert_width=64)
LARGE = SIZES._replace(hidden=2048, heads=32, experts=32, expert_width=768)
"""Layers of Qwen3-30B-A3B with a quarter of its experts."""
BFLOAT16 = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}
LARGE_WIDTH = 2048
PAIRS, FEW_PAIRS = 20, 3


def run(figures: Figures) -> None:
    """Measure steps of one model."""
    with tempfile.TemporaryDirectory() as folder:
        start_megatron(folder, figures.device)
        sizes, settings, width = (LARGE, BFLOAT16, LARGE_WIDTH) if figures.full else (SMALL, {}, 32)
        bench = Bench.of(settings, sizes, figures.device, width)
        candidates: dict[str, Callable[[], object]] = {
            "step": bench.replayed(),
            "step_with_telemetry": bench.replayed(telemetry=True),
            "step_a_over_a": partial(bench.native),
        }
        for name, candidate in candidates.items():
            ratio = compare(
                partial(figures.timed, candidate),
                partial(figures.timed, bench.native),
                pairs=PAIRS if figures.full else FEW_PAIRS,
            )
            figures.record_ratio(name, ratio)
            figures.record(native_step_ms=round(ratio.baseline_ms, 2))
        figures.record(
            step_with_telemetry_ratio_aim="<= 1.005",
            tokens_of_step=MICRO_BATCHES * SEQUENCES * width,
            layers=SIZES.layers,
        )
        torch.distributed.destroy_process_group()
