"""Seconds of a step on recorded routes without a replica, over a static one and one with replicas, on two processes.

A mini-batch of the routes of `benchmarks.packing` is replayed by a model with as many layers and experts, each process
on a core of its own. *Static* are sequences packed by length, with experts in blocks; *planned* is the same under a
plan with two slots, which is counted, planned and published on the clock; *homes* are sequences packed by routes, and
homes placed for them, both found on the clock. Experts move before the step, without optimizer state here; what that
takes is told beside. Activations are computed anew in backward passes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.models import Sizes
from benchmarks.harness.pairs import PairedRatio, seconds_in_turn
from benchmarks.harness.spread_bench import LINKS, HFBench, in_processes
from benchmarks.harness.step_prediction import PASSES
from benchmarks.harness.step_seconds import own_core, recomputing_model
from foreroute.adapters import hf
from foreroute.layout import Packing, pack_sequences
from foreroute.plan import PlanOptions, Topology, sequence_counts
from foreroute.planner.packed_homes import PackedSequences
from foreroute.trace import RoutingTrace, load

SIZES = Sizes(hidden=256, heads=4, kv_heads=2, experts=64, top_k=8, expert_width=512, layers=8)
SEQUENCES, MICRO_STEPS, SLOTS = 32, 4, 2
"""Sequences of a mini-batch, from all over the last recorded step, about four of a rank in a micro-step."""
ROOM = 1.08
"""The token budget over the mean of a rank in a micro-step."""
RATIOS = {
    "packing_and_homes_over_static": ("homes", "static"),
    "packing_and_homes_over_planned": ("homes", "planned"),
    "recorded_planned_over_static": ("planned", "static"),
}
NAMES = (*RATIOS, "homes_move_over_static_update", "static_update_s", "recorded_imbalance")
PADDING = 0
"""Tokens of the recorded texts are made 1 and more."""


class RecordedBench(HFBench):
    """A bench on sequences of any lengths, padded on the right."""

    def run(self, *, updating: bool = True) -> None:
        for batch, rows in zip(self.batches, self.routes_M, strict=True):
            with torch.set_grad_enabled(updating), self.routed.replay(rows):
                logits = self.model(input_ids=batch, attention_mask=(batch != PADDING).long(), use_cache=False).logits
                loss = logits.float().log_softmax(-1)[..., 0].mean()
                if updating:
                    loss.backward()
        self.model.zero_grad(set_to_none=True)


def recorded_seconds(pairs: int, path: Path | None) -> dict[str, Any]:
    """Measure `packing_and_homes_over_static` and `packing_and_homes_over_planned` by pass, of the trace of a step.

    Ratios are medians of so many rounds that all three ran in turn, with their 95 % intervals. Beside them
    `recorded_planned_over_static`, seconds in which homes move over those of a static update, and what ranks get: the
    slowest of all cells over the means. None without pairs, routes, or two cores.
    """
    if not pairs or path is None or len(os.sched_getaffinity(0)) < 2:
        return dict.fromkeys(NAMES)
    found: dict[str, Any] = in_processes(_measured, 2, pairs, path.resolve())
    return found


def _measured(rank: int, num_ranks: int, pairs: int, path: Path) -> dict[str, Any]:
    own_core(rank)
    with closing(recomputing_model(SIZES)) as still, closing(recomputing_model(SIZES)) as moved:
        recorded = load(path)
        whole = _routes(recorded.select(np.arange(0, len(recorded), len(recorded) // SEQUENCES)), still)
        counts_SLE, lengths_S = sequence_counts(whole).astype(np.int64), whole.lengths.astype(np.int64)
        budget = int(max(lengths_S.max(), ROOM * lengths_S.sum() / (num_ranks * MICRO_STEPS)))
        by_length = pack_sequences(lengths_S, num_ranks, budget)
        given = PackedSequences(
            packing=by_length, lengths_S=lengths_S, counts_SLE=counts_SLE, token_budget=budget, square_cost=0.0
        )
        topology = Topology(num_ranks, num_ranks, SLOTS, LINKS)
        packed, home_LE = given.with_homes(topology, still.home_LE)
        dist.barrier()
        begun = time.perf_counter()
        moved.move_homes(home_LE)
        dist.barrier()
        move_s = time.perf_counter() - begun
        static = _bench(still, whole, by_length, rank)
        homes = _bench(moved, whole, packed.packing, rank)

        def leveled_step(updating: bool) -> None:
            given.with_homes(topology, still.home_LE)  # known already; that it takes time is the point
            moved.gather_counts(homes.routes_M)
            homes.unplanned_step(updating=updating)

        works: dict[str, Callable[[bool], object]] = {
            "homes": leveled_step,
            "static": lambda updating: static.unplanned_step(updating=updating),
            "planned": lambda updating: static.paid_step(PlanOptions(), updating=updating),
        }
        ratios: dict[str, dict[str, Any]] = {name: {} for name in RATIOS}
        for pass_name, updating in PASSES.items():
            seconds = seconds_in_turn({name: partial(work, updating) for name, work in works.items()}, rounds=pairs)
            for name, (one, other) in RATIOS.items():
                ratios[name][pass_name] = PairedRatio.of(seconds[one], seconds[other]).shown()
        static_s, mean = median(seconds["static"]), counts_SLE.sum() / num_ranks
        plans = {"planned": static.plan(PlanOptions())}
        plans |= {name: each.plan(PlanOptions(replicas=False)) for name, each in (("static", static), ("homes", homes))}
        return ratios | {
            "homes_move_over_static_update": round(move_s / static_s, 4),
            "static_update_s": round(static_s, 3),
            "recorded_imbalance": {
                name: round(float(plan.max_load_ML.sum() / mean), 4) for name, plan in plans.items()
            },
        }


def _routes(trace: RoutingTrace, routed: hf.RoutedTransformer) -> RoutingTrace:
    """Give the model these sequences, but for tokens that nobody routed, and their routes."""
    tokens, ids = [], []
    for s in range(len(trace)):
        one = trace.select([s])
        kept = np.flatnonzero(one.valid_N)
        tokens.append(one.token_ids_N[kept] + 1)
        ids.append(one.expert_ids_NLK[kept])
    return RoutingTrace.from_sequences(routed.spec, tokens, ids)


def _bench(routed: hf.RoutedTransformer, trace: RoutingTrace, packing: Packing, rank: int) -> RecordedBench:
    """Put this rank's sequences into padded micro-batches."""
    batches, traces = [], []
    for m in range(packing.num_micro_steps):
        mine = trace.select(packing.sequences(m, rank))
        padded = mine.to_padded()
        batches.append(torch.from_numpy(np.where(padded[2], padded[0], PADDING)).long())
        traces.append(mine)
    return RecordedBench.of(routed.model, routed, batches, traces, slots=SLOTS)
