"""Seconds of a training step by foreroute's implementation of expert parallelism over transformers' "all_to_all".

Every expert serves at its home on both sides, and both have the same weights, tokens and routes, which are those that
the routers choose. foreroute replays them, and so knows split sizes ahead; counting the routes of the step, gathering
the counts, and what ranks agree on as the step begins and ends are on its clock. *Replayed* is "all_to_all" under the
same replay, so that the implementation alone differs; *native* is transformers as it is, without a session.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.models import Sizes, run_model, spread_model
from benchmarks.harness.pairs import PairedRatio, seconds_in_turn
from benchmarks.harness.spread_bench import in_processes
from foreroute.adapters import hf
from foreroute.adapters.hf.trace_rows import TraceRows

MICRO_STEPS = 4
"""Of a step."""


class Setting(NamedTuple):
    """Sizes of a model, and sequences and tokens of a micro-batch of a rank."""

    sizes: Sizes
    shape: tuple[int, int]


SETTINGS = {
    "few_rows": Setting(Sizes(256, 4, 2, experts=16, top_k=4, expert_width=128, layers=8), (2, 32)),
    "many_rows": Setting(Sizes(512, 8, 4, experts=16, top_k=4, expert_width=256, layers=8), (2, 128)),
}
"""64 and 256 tokens of a rank in a micro-step: 32 and 128 rows for each of 16 experts."""


def seconds_over_all_to_all(pairs: Mapping[str, int]) -> dict[str, Any]:
    """Measure ratios by setting, medians of so many pairs with the 95 % interval; None without pairs, or two cores."""
    found: dict[str, Any] = dict.fromkeys(SETTINGS)
    if len(os.sched_getaffinity(0)) > 1:
        found |= {name: in_processes(_measured, 2, SETTINGS[name], number) for name, number in pairs.items()}
    return found


def _measured(rank: int, num_ranks: int, setting: Setting, pairs: int) -> dict[str, Any]:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    foreroute, all_to_all = (hf.attach(spread_model(setting.sizes, name)) for name in ("foreroute", "all_to_all"))
    rng = np.random.default_rng(rank)
    batches = [torch.from_numpy(rng.integers(0, 256, setting.shape)) for _ in range(MICRO_STEPS)]
    traces = []
    for batch in batches:
        with all_to_all.record() as recording, torch.no_grad():
            all_to_all.model(input_ids=batch, use_cache=False)
        traces.append(recording.trace())
    works = {
        "foreroute": partial(_step, foreroute, batches, [foreroute.rows(trace) for trace in traces], is_known=True),
        "replayed": partial(_step, all_to_all, batches, [all_to_all.rows(trace) for trace in traces]),
        "native": partial(_step, all_to_all, batches),
    }
    seconds = seconds_in_turn(works, rounds=pairs)
    ratios = {name: PairedRatio.of(seconds["foreroute"], seconds[name]) for name in ("replayed", "native")}
    return {f"over_{name}": ratio.shown() for name, ratio in ratios.items()} | {
        "all_to_all_ms": round(ratios["native"].baseline_ms, 2)
    }


def _step(
    routed: hf.RoutedTransformer,
    batches: Sequence[torch.Tensor],
    rows_M: Sequence[TraceRows] | None = None,
    *,
    is_known: bool = False,
) -> None:
    """Run all micro-steps, forward and backward, replayed if there are rows; ranks end together."""
    executing: AbstractContextManager[object] = nullcontext()
    if is_known:
        assert rows_M is not None, "what is known is replayed"
        for rows in rows_M:
            # counts are kept for executions of the same rows, and a training step sees its rows once
            rows._counts.clear()
        executing = routed.execute(None, routed.gather_counts(rows_M), rows_M)
    with executing:
        for number, batch in enumerate(batches):
            with nullcontext() if rows_M is None else routed.replay(rows_M[number]):
                run_model(routed.model, batch)
    routed.model.zero_grad(set_to_none=True)
    dist.barrier()
