"""Planning the indices of one rank: 2,048 sequences of up to 8,192 tokens, every micro-batch of the step.

`step` plans what a rank of CP 2 x TP 4 does per step: even micro-batches of 32,768 tokens, and for each the sequences
packed to a multiple of 16, the zigzag context split, the sequence split and the int32 indices.
`step_alone` plans the same with no ranks to share with, so that every token of the step is written.
`full` writes the indices of 2,048 sequences of exactly 8,192 tokens in one go.

The floor of each is writing its int32 indices once to fresh memory (`np.full`). The baseline is what trainers do: lay
out every sequence in full, pad, join, and cut this rank's share out of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.pairs import compare
from foreroute import layout

SEQUENCES, LONGEST, BUDGET = 2048, 8192, 32_768
CP, TP = 2, 4


def run(*, quick: bool) -> dict[str, Any]:
    """Medians in milliseconds, floors in milliseconds, and the ratio to the baseline."""
    pairs = 5 if quick else 21
    lengths = _lognormal_lengths()
    full = np.full(SEQUENCES, LONGEST)
    step = _timed(lambda: _plan_step(lengths, CP, TP), pairs)
    alone = _timed(lambda: _plan_step(lengths, 1, 1), pairs)
    whole = _timed(lambda: [layout.pack(full).rows()], pairs)
    against = compare(lambda: _plan_step(lengths, CP, TP), lambda: _cut_out_of_everything(lengths), pairs=pairs)
    return {
        "metrics": {
            "tokens": int(lengths.sum()),
            "step": step,
            "step_alone": alone,
            "full": whole,
            "over_baseline": {"ratio": against.ratio, "low": against.low, "high": against.high},
        },
        "baselines": {"everything_then_cut_ms": against.baseline_ms, "budget_ms": 50.0},
    }


def _lognormal_lengths() -> NDArray[np.int64]:
    drawn = np.random.default_rng(0).lognormal(np.log(3000), 0.8, SEQUENCES)
    return np.clip(drawn, 16, LONGEST).astype(np.int64)


def _plan_step(lengths: NDArray[np.int64], cp: int, tp: int) -> list[layout.RankRows]:
    align = 2 * cp * tp
    return [
        layout.pack(lengths[sequences], align=align).split_context(cp, cp - 1).split_sequence(tp, tp - 1).rows()
        for sequences in _micro_batches(lengths, align)
    ]


def _micro_batches(lengths: NDArray[np.int64], align: int) -> list[NDArray[np.int64]]:
    packing = layout.pack_sequences(-(-lengths // align) * align, 1, BUDGET)
    return [packing.sequences(m, 0) for m in range(packing.num_micro_steps)]


def _cut_out_of_everything(lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    align, starts = 2 * CP * TP, np.cumsum(lengths) - lengths
    planned = []
    for sequences in _micro_batches(lengths, align):
        shares = []
        for s in sequences:
            rows = np.arange(starts[s], starts[s] + lengths[s])
            chunks = np.split(np.pad(rows, (0, -len(rows) % align), constant_values=layout.PAD), 2 * CP)
            shares += [chunks[CP - 1], chunks[CP]]
        planned.append(np.split(np.concatenate(shares), TP)[TP - 1])
    return planned


def _timed(plan: Callable[[], list[layout.RankRows]], pairs: int) -> dict[str, float]:
    sizes = [len(rows) for rows in plan()]
    ratio = compare(plan, lambda: [np.full(size, 7, np.int32) for size in sizes], pairs=pairs)
    return {
        "ms": ratio.ratio * ratio.baseline_ms,
        "micro_batches": len(sizes),
        "slots": sum(sizes),
        "mib_written": sum(sizes) * 4 / 2**20,
        "floor_ms": ratio.baseline_ms,
        "over_floor": ratio.ratio,
    }
