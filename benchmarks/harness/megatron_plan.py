"""Seconds of a Megatron step under a plan, on two processes (`step_seconds`).

*Static* is Megatron as it is, attached and replaying the same routes. *Attached* is a step whose wrapped forward is
given no routes, over the same step of a model that was never attached. What a step posts, asks and waits for is counted
by tests/adapters/megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.harness.models import forward_step, gpt_model, run_schedule, start_megatron_ranks
from benchmarks.harness.pairs import compare, near_one
from benchmarks.harness.spread_bench import MegatronBench, measured_cluster
from benchmarks.harness.step_prediction import processes_config
from benchmarks.harness.step_seconds import (
    LEVEL_SLOTS,
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
NAMES = ("planned_over_static", "predicted_planned_over_static", "static_imbalance", "attached_ratio", "gains")


def planned_step(pairs: int) -> dict[str, Any]:
    """Measure `planned_over_static` by pass and skew and `attached_ratio`, and find what goes with them.

    Beside them `predicted_planned_over_static` and `gains` by pass and skew, and `static_imbalance` by skew. Ratios are
    medians over pairs that were run in turn, with the 95 % interval of the median. Without pairs, or two cores, all are
    None.
    """
    config = processes_config(SIZES, 2, slots=LEVEL_SLOTS, sequence_tokens=SHAPE[1], paths="direct")
    return with_predictions(_measured, pairs, config, NAMES)


def _measured(rank: int, num_ranks: int, pairs: int, path: Path) -> Measured:
    own_core(rank)
    start_megatron_ranks(num_ranks)
    cluster, bench = measured_cluster(path, SHAPE[0] * SHAPE[1]), _bench()
    draw = partial(MegatronBench.drawn, bench.model, bench.routed, shape=SHAPE, slots=LEVEL_SLOTS)
    found, cases = planned_over_static(draw, cluster, pairs)
    found |= near_one("attached", compare(*_without_routes(bench), pairs=pairs))
    return Measured(found, cases, other_steps(draw, OTHER_SEQUENCES, SHAPE[1]))


def _bench() -> MegatronBench:
    """Build a model that all ranks share, with drawn routes."""
    from foreroute.adapters import megatron

    model = _gpt_model()
    return MegatronBench.drawn(model, megatron.attach(model), shape=SHAPE, slots=LEVEL_SLOTS)


def _gpt_model() -> Any:
    return gpt_model(SIZES, {"expert_model_parallel_size": dist.get_world_size()}, SHAPE[1])


def _without_routes(bench: MegatronBench) -> tuple[Callable[[], object], Callable[[], object]]:
    """Give steps of micro-batches that bring no routes: of the attached model, and of an equal one that never was."""
    batches = [{"tokens": tokens, "routes": None} for tokens in bench.batches]
    return (
        partial(run_schedule, bench.model, bench.routed.replaying(forward_step), batches),
        partial(run_schedule, _gpt_model(), forward_step, batches),
    )
