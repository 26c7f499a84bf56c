"""A Megatron step under a plan, on two processes: its seconds (`step_seconds`), and what it posts, asks and waits for.

*Static* is Megatron as it is, attached and replaying the same routes. *Attached* is a step whose wrapped forward is
given no routes, over the same step of a model that was never attached.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.harness.executor_counts import posting
from benchmarks.harness.launch_path import launches
from benchmarks.harness.models import forward_step, gpt_model, run_schedule, start_megatron_ranks
from benchmarks.harness.pairs import compare, near_one
from benchmarks.harness.spread_bench import MegatronBench, measured_cluster
from benchmarks.harness.step_prediction import processes_config
from benchmarks.harness.step_seconds import (
    LEVEL_SLOTS,
    PLANNED,
    SIZES,
    Measured,
    other_steps,
    own_core,
    planned_over_static,
    with_predictions,
)

SHAPE = (4, 256)
"""Sequences of a micro-batch and tokens of each."""
OTHER_SEQUENCES = (2, 6)
SKEW = 0.6
"""Of what is counted; static imbalance about 1.6."""
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
NAMES = (
    *("planned_over_static", "predicted_planned_over_static", "static_imbalance", "attached_ratio", "gains"),
    *("collectives_saved", "host_waits", "waits_per_layer"),
    *("posted_behind_rows", "fetches_per_cell", "votes_per_step", "aten_over_unpatched"),
)


def planned_step(pairs: int) -> dict[str, Any]:
    """Measure `planned_over_static` by pass and skew and `attached_ratio`, and count what goes with them.

    Beside them `predicted_planned_over_static` and `gains` by pass and skew, `static_imbalance` by skew,
    `collectives_saved` and `host_waits`, the most of these per layer and micro-step under a plan, and what one rank
    posts, asks and launches. Ratios are medians over pairs that were run in turn, with the 95 % interval of the median.
    Without pairs nothing is timed, and without two cores nothing is counted either; it is None then.
    """
    found: dict[str, Any] = dict.fromkeys(NAMES)
    if len(os.sched_getaffinity(0)) > 1:
        config = processes_config(SIZES, 2, slots=LEVEL_SLOTS, sequence_tokens=SHAPE[1], paths="direct")
        found |= with_predictions(_measured, pairs, config)
    return found


def _measured(rank: int, num_ranks: int, pairs: int, path: Path) -> Measured:
    own_core(rank)
    start_megatron_ranks(num_ranks)
    found: dict[str, Any] = {"collectives_saved": {}, "host_waits": {}}
    for recompute in ("none", "selective"):
        counted = _bench(RECOMPUTE[recompute])
        (gathers, waits), (gathers_left, waits_left) = _asked(counted, planned=False), _asked(counted, planned=True)
        found["collectives_saved"][recompute] = gathers - gathers_left
        found["host_waits"][recompute] = {"static": waits, "planned": waits_left}
    found["waits_per_layer"] = max(waits["planned"] for waits in found["host_waits"].values())
    found |= _counted(_bench({}))
    if not pairs:
        return Measured(found, {}, [])
    cluster, bench = measured_cluster(path, SHAPE[0] * SHAPE[1]), _bench({})
    draw = partial(MegatronBench.drawn, bench.model, bench.routed, shape=SHAPE, slots=LEVEL_SLOTS)
    figures, cases = planned_over_static(draw, cluster, pairs)
    found |= figures | near_one("attached", compare(*_without_routes(bench), pairs=pairs))
    return Measured(found, cases, other_steps(draw, OTHER_SEQUENCES, SHAPE[1]))


def _bench(settings: dict[str, Any]) -> MegatronBench:
    """Build a model that all ranks share, with routes that favour the experts of one of them."""
    from foreroute.adapters import megatron

    model = _gpt_model(settings)
    return MegatronBench.drawn(model, megatron.attach(model), skew=SKEW, shape=SHAPE, slots=LEVEL_SLOTS)


def _gpt_model(settings: dict[str, Any]) -> Any:
    return gpt_model(SIZES, {"expert_model_parallel_size": dist.get_world_size(), **settings}, SHAPE[1])


def _without_routes(bench: MegatronBench) -> tuple[Callable[[], object], Callable[[], object]]:
    """Give steps of micro-batches that bring no routes: of the attached model, and of an equal one that never was."""
    batches = [{"tokens": tokens} for tokens in bench.batches]
    return (
        partial(run_schedule, bench.model, bench.routed.replaying(forward_step), batches),
        partial(run_schedule, _gpt_model({}), forward_step, batches),
    )


def _asked(bench: MegatronBench, *, planned: bool) -> tuple[float, float]:
    """Count gathers of counts, and waits of the host for the device, of the dispatchers, by layer and micro-batch."""
    from megatron.core.transformer.moe import token_dispatcher as dispatchers

    gather: Callable[..., Any] = dispatchers.gather_from_sequence_parallel_region
    with (
        mock.patch.object(dispatchers, "gather_from_sequence_parallel_region", side_effect=gather) as gathers,
        mock.patch.object(type(torch.cuda.current_stream()), "synchronize") as waits,
    ):
        bench.step(bench.plan(PLANNED) if planned else None)
    cells = len(bench.batches) * SIZES.layers
    return gathers.call_count / cells, waits.call_count / cells


def _counted(bench: MegatronBench) -> dict[str, float]:
    """Count what the second of two planned steps posts and asks, and operators over those of the unpatched model."""
    plan = bench.plan(PLANNED)
    bench.step(plan)
    layers = [module for module in bench.model.modules() if type(module).__name__ == "MoELayer"]
    with posting(layers) as posted, bench.executing(plan):
        begun = posted.questions
        bench.run()
        asked = posted.questions - begun
    unpatched = _without_routes(bench)[1]
    return {
        "posted_behind_rows": posted.num_behind_rows / posted.num_fetches,
        "fetches_per_cell": posted.num_fetches / int((plan.num_replicas_ML > 0).sum()),
        "votes_per_step": asked,
        "aten_over_unpatched": round(launches(lambda: bench.step(plan)) / launches(unpatched), 4),
    }
