"""Seconds of a planned step over those of a static one, on two processes with a core each, where expert GEMMs dominate.

The model is small in layers and large in experts, so that fetching a replica is little beside the rows that it serves,
as on a cluster. *Static* has every expert at its home; *balanced* are as many tokens on uniform routes, at home.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.harness.execution_bench import Bench, in_processes
from benchmarks.harness.pairs import median_interval
from foreroute.adapters import hf
from foreroute.ep.transfer.engine import TransferEngine
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.plan import PlanOptions, StepPlan

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}
SHAPE = (4, 256)
"""Sequences and tokens of a micro-batch."""
SKEWS = {"low": 0.3, "middle": 0.6, "high": 1.0}
"""Static imbalance about 1.3, 1.6 and 1.9 on two ranks."""
Case = tuple[Bench, StepPlan, TransferEngine]
STAGES = {"recompute": False, "update": True}


def step_seconds(pairs: int, skews: Sequence[str] = tuple(SKEWS)) -> dict[str, Any]:
    """`planned_over_static` by stage and skew, `planned_over_balanced` and `static_imbalance` by skew.

    Ratios are medians over pairs that were run in turn, with the 95 % interval of the median. Without two cores, and
    with fewer pairs than resolve an interval, they are None.
    """
    if len(os.sched_getaffinity(0)) < 2:
        return dict.fromkeys(("planned_over_static", "planned_over_balanced", "static_imbalance"))
    measured: dict[str, Any] = in_processes(_measured, 2, pairs, skews)
    return measured


def _measured(rank: int, num_ranks: int, pairs: int, skews: Sequence[str]) -> dict[str, Any]:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    model = hf.build_model("qwen3_moe", seed=0, **SIZES)
    routed = hf.attach(model)
    placed = hf.distribute(model, timeout_s=120)
    peers = PeerGroup(timeout_s=120)
    found: dict[str, Any] = {
        "planned_over_static": {stage: {} for stage in STAGES},
        "planned_over_balanced": {},
        "static_imbalance": {},
    }
    even = Bench.routed_anew(routed, placed, rank, num_ranks, skew=0.0, shape=SHAPE)
    for name in skews:
        bench = Bench.routed_anew(routed, placed, rank, num_ranks, skew=SKEWS[name], shape=SHAPE)
        plan, home = bench.plan(PlanOptions(tolerance=0.02)), bench.plan(PlanOptions(replicas=False))
        mean = bench.counts_MLGE.sum() / num_ranks
        found["static_imbalance"][name] = round(float(home.max_load_ML.sum() / mean), 3)
        with closing(bench.engine(peers, slots="layer")) as engine:
            placed.use(engine)
            planned, static = (bench, plan, engine), (bench, home, engine)
            for stage, updating in STAGES.items():
                found["planned_over_static"][stage][name] = _ratio(planned, static, updating, pairs)
            balanced = (even, even.plan(PlanOptions(replicas=False)), engine)
            found["planned_over_balanced"][name] = _ratio(planned, balanced, True, pairs)
    return found


def _ratio(candidate: Case, baseline: Case, updating: bool, pairs: int) -> dict[str, float | None]:
    """Seconds of one over the other: median and the 95 % interval of the median over pairs that were run in turn."""
    ratios = []
    for pair in range(pairs + 1):
        order = (candidate, baseline) if pair % 2 else (baseline, candidate)
        seconds = [_seconds(each, updating) for each in order]
        if pair:  # the first warms up
            ratios.append(seconds[0] / seconds[1] if pair % 2 else seconds[1] / seconds[0])
    interval = median_interval(ratios) or (None, None)
    values = zip(("median", "lower", "upper"), (median(ratios), *interval), strict=True)
    return {name: None if value is None else round(value, 4) for name, value in values}


def _seconds(case: Case, updating: bool) -> float:
    bench, plan, engine = case
    engine.publish()
    dist.barrier()
    begun = time.perf_counter()
    bench.step(plan, updating=updating)
    dist.barrier()
    return time.perf_counter() - begun
