"""What executing a plan costs and brings on 2 and 4 gloo processes of one machine.

One step of four micro-steps, forward and backward, on skewed routes that are replayed: under the plan, and with every
expert at its home, in turn; publishing the weights and planning are on the clock. The busiest rank's assignments are
those that were computed. On a machine with fewer cores than processes a balanced step is no faster, since all of the
work is done by the same cores; overlap is not measured. What a GPU has of it is a part of `python -m benchmarks gpu`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.harness.execution_bench import BATCH, MICRO_STEPS, SIZES, SLOTS, Bench, in_processes
from benchmarks.harness.executor_counts import (
    busiest,
    distribute_peak_over_share,
    fetched_bytes,
    launches,
    posting,
    summed,
    waits_per_layer,
)
from benchmarks.harness.pairs import compare
from benchmarks.harness.schedule_bench import host_work
from benchmarks.harness.step_seconds import step_seconds
from foreroute.adapters import hf
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.ep.transfer.replica_weights import Cell, expert_bytes
from foreroute.plan import PlanOptions
from foreroute.plan.capabilities import FetchPath
from foreroute.plan.schedule import ExecutionSchedule

WORST = (
    *("executed_over_planned", "bytes_over_least", "host_over_direct"),
    *("fetches_per_cell", "votes_per_step", "aten_over_unpatched", "gradient_bytes_over_lent_rows"),
)

LARGE: dict[str, Any] = SIZES | {"num_hidden_layers": 6, "hidden_size": 512, "moe_intermediate_size": 512}
"""Of experts of 3 MB, whose weights are nearly all that the model has."""


def run(*, quick: bool) -> dict[str, Any]:
    """The figures of rank 0 on 2 and on 4 processes."""
    pairs = 3 if quick else 20
    by_ranks = {str(num_ranks): in_processes(_measured, num_ranks, pairs) for num_ranks in (2, 4)}
    worst = {name: max(figures[name] for figures in by_ranks.values()) for name in WORST} | {
        "posted_behind_rows": min(figures["posted_behind_rows"] for figures in by_ranks.values())
    }
    with tempfile.TemporaryDirectory() as folder:
        hf.build_model("qwen3_moe", seed=0, **LARGE).save_pretrained(folder)
        peak = in_processes(distribute_peak_over_share, 4, Path(folder))
    return {
        "metrics": worst
        | {"waits_per_layer": in_processes(waits_per_layer, 1), "distribute_peak_over_share": round(peak, 2)}
        | {"by_ranks": by_ranks}
        | host_work(15 if quick else 50)
        | step_seconds(0 if quick else 20),
        "baselines": {"busiest_over_mean_at_home": {n: f["busiest_over_mean_at_home"] for n, f in by_ranks.items()}},
        "setting": {"sizes": SIZES, "micro_steps": MICRO_STEPS, "batch": BATCH, "slots": SLOTS, "pairs": pairs},
    }


def _measured(rank: int, num_ranks: int, pairs: int) -> dict[str, Any]:
    bench = Bench.of(rank, num_ranks)
    return _counted(bench) | _steps(bench, pairs) | _fetches(bench, pairs)


def _counted(bench: Bench) -> dict[str, float]:
    """What a planned step with weights from peer to peer posts and asks, and operators over the unpatched model's."""
    plan = bench.plan(PlanOptions())
    layers = [layer.module for layer in bench.placed.layers]
    with posting(layers) as posted, bench.executing(plan):
        begun = posted.questions
        bench.run()
        ended = posted.questions
    lent = int(plan.num_replicas_ML.sum()) * expert_bytes(bench.placed.homes[0])
    model = hf.build_model("qwen3_moe", seed=0, **SIZES)

    def unpatched() -> None:
        for batch in bench.batches:
            model(input_ids=batch, use_cache=False).logits.log_softmax(-1)[..., 0].mean().backward()

    return {
        "posted_behind_rows": posted.num_behind_rows / posted.num_fetches,
        "fetches_per_cell": posted.num_fetches / int((plan.num_replicas_ML > 0).sum()),
        "votes_per_step": ended - begun,
        "aten_over_unpatched": round(launches(lambda: bench.step(plan)) / launches(unpatched), 4),
        "gradient_bytes_over_lent_rows": round(summed(posted.returned_bytes) / lent, 4),
    }


def _steps(bench: Bench, pairs: int) -> dict[str, Any]:
    plan, at_home = bench.plan(PlanOptions()), bench.plan(PlanOptions(replicas=False))
    bench.placed.use(TransferOptions())
    with closing(bench.placed):
        home, planned = (bench.step(chosen) for chosen in (at_home, plan))
        moved = fetched_bytes(planned)
        options = PlanOptions()
        seconds = compare(lambda: bench.paid_step(options), lambda: bench.unplanned_step(at_home), pairs=pairs)
    mean = float(bench.counts_MLGE.sum()) / plan.topology.num_ranks
    return {
        "executed_over_planned": busiest(planned.executed_ML) / int(plan.max_load_ML.sum()),
        "bytes_over_least": moved / (int(plan.hosts.fetched_R.sum()) * expert_bytes(bench.placed.homes[0])),
        "busiest_over_mean": round(busiest(planned.executed_ML) / mean, 4),
        "busiest_over_mean_at_home": round(busiest(home.executed_ML) / mean, 4),
        "planned_over_static_step": seconds.shown(),
    }


def _fetches(bench: Bench, pairs: int) -> dict[str, Any]:
    """The replicas of all cells, one after the other, into slots that hold nothing of use."""
    plan, peers = bench.plan(PlanOptions(slots="shared")), PeerGroup(timeout_s=120)

    def engine(paths: FetchPath) -> TransferEngine:
        return TransferEngine(bench.placed.homes, TransferOptions(paths, prefetch=0), peers)

    def fetching(engine: TransferEngine) -> Callable[[], None]:
        def fetch_all() -> None:
            schedule = ExecutionSchedule(plan, bench.counts_MLGE, dist.get_rank(), paths=engine.paths)
            engine.begin_step(0, plan, schedule)
            for m, layer in np.ndindex(*plan.shape[:2]):
                engine.fetch(Cell(0, m, layer), bench.placed.homes[layer]).wait()
            dist.barrier()

        return fetch_all

    with closing(engine("host")) as host, closing(engine("direct")) as direct:
        seconds = compare(fetching(host), fetching(direct), pairs=3 * pairs)
    return {"host_over_direct": round(seconds.ratio, 4), "host_over_direct_pairs": seconds.shown()}
