"""Costs and gains of an executed plan on 2 and 4 gloo processes of one machine.

One step of four micro-steps, forward and backward, on skewed routes that are replayed: under the plan, and with every
expert at its home, in turn; publishing the weights and planning are on the clock. The busiest rank's assignments are
those that were computed. On a machine with fewer cores than processes a balanced step is no faster, since all of the
work is done by the same cores; overlap is not measured. What a GPU has of it is a part of `python -m benchmarks gpu`.
What a step posts, fetches, asks and waits for is counted by tests. `over_all_to_all` has no plan: see
`harness.implementations`.

Parts: "counts" is what is said above, "all_to_all" a step without a plan, "seconds" steps whose experts are large
(`harness.step_seconds`), "recorded" steps of recorded routes (`harness.recorded_steps`), where a run kept some.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.implementations import SETTINGS, seconds_over_all_to_all
from benchmarks.harness.models import spread_model
from benchmarks.harness.pairs import compare
from benchmarks.harness.recorded_steps import recorded_seconds
from benchmarks.harness.schedule_bench import host_work
from benchmarks.harness.spread_bench import BATCH, MICRO_STEPS, SIZES, SLOTS, HFBench, in_processes
from benchmarks.harness.step_seconds import step_seconds
from foreroute.adapters import hf
from foreroute.ep.agreement import RankConsensus
from foreroute.ep.transfer.cells import Cell
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.plan import PlanOptions, StepPlan
from foreroute.plan.capabilities import FetchPath
from foreroute.plan.schedule import ExecutionSchedule

PAIRS = 6
"""Of long steps: the fewest whose least and most are a 95 % interval of the median."""
PARTS = ("counts", "all_to_all", "seconds", "recorded")
STARTS = Path("runs/starts")
"""Where experiments keep recorded routes."""


def run(*, quick: bool, parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """The figures of these parts, of rank 0."""
    if unknown := sorted({*parts} - {*PARTS}):
        sys.exit(f"execution has no part {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    result: dict[str, Any] = {"metrics": {}, "baselines": {}, "setting": {"parts": [*parts]}}
    metrics = result["metrics"]
    if "counts" in parts:
        pairs = 3 if quick else 10
        by_ranks = {str(num_ranks): in_processes(_measured, num_ranks, pairs) for num_ranks in (2, 4)}
        metrics |= {"by_ranks": by_ranks} | host_work(15)
        result["baselines"]["busiest_over_mean_at_home"] = {
            n: figures["busiest_over_mean_at_home"] for n, figures in by_ranks.items()
        }
        result["setting"] |= {"sizes": SIZES._asdict(), "micro_steps": MICRO_STEPS, "batch": BATCH}
        result["setting"] |= {"slots": SLOTS, "pairs": pairs}
    if "all_to_all" in parts:
        rounds = {"few_rows": 2} if quick else {"few_rows": 12, "many_rows": 6}
        metrics["over_all_to_all"] = seconds_over_all_to_all(rounds)
        result["setting"]["over_all_to_all"] = {
            name: (each.sizes._asdict(), each.shape, rounds.get(name)) for name, each in SETTINGS.items()
        }
    if "seconds" in parts:
        metrics |= step_seconds(0 if quick else PAIRS)
    if "recorded" in parts:
        kept = sorted(STARTS.glob("routes-*/step-*.safetensors"))
        metrics |= recorded_seconds(0 if quick else PAIRS, kept[-1] if kept else None)
    return result


def _measured(rank: int, num_ranks: int, pairs: int) -> dict[str, Any]:
    routed = hf.attach(spread_model(SIZES))
    bench = HFBench.drawn(routed.model, routed)
    return _steps(bench, pairs) | _fetches(bench, pairs)


def _steps(bench: HFBench, pairs: int) -> dict[str, Any]:
    options = PlanOptions()
    plan = bench.plan(options)
    bench.routed.use(TransferOptions(paths="host"))
    with closing(bench.routed):
        home, planned = (_busiest_over_mean(bench, chosen) for chosen in (None, plan))
        seconds = compare(lambda: bench.paid_step(options), bench.unplanned_step, pairs=pairs)
    return {
        "busiest_over_mean": planned,
        "busiest_over_mean_at_home": home,
        "planned_over_static_step": seconds.shown(),
    }


def _busiest_over_mean(bench: HFBench, plan: StepPlan | None) -> float:
    """Add up over cells what the busiest rank of each has computed. A collective call."""
    with bench.executing(plan) as execution:
        bench.run()
    most_ML = torch.from_numpy(execution.executed_ML.copy())
    dist.all_reduce(most_ML, dist.ReduceOp.MAX)
    return round(int(most_ML.sum()) * dist.get_world_size() / float(bench.counts_MLGE.sum()), 4)


def _fetches(bench: HFBench, pairs: int) -> dict[str, Any]:
    """The replicas of all cells, one after the other, into slots that hold nothing of use."""
    plan, peers, homes = bench.plan(PlanOptions(slots="shared")), PeerGroup(timeout_s=120), bench.homes

    def engine(paths: FetchPath) -> TransferEngine:
        return TransferEngine(homes, TransferOptions(paths, prefetch=0), peers, RankConsensus(peers.group))

    def fetching(engine: TransferEngine) -> Callable[[], None]:
        def fetch_all() -> None:
            schedule = ExecutionSchedule(plan, bench.counts_MLGE, dist.get_rank(), paths=engine.options.paths)
            engine.begin_step(0, plan, schedule)
            for m, layer in np.ndindex(*plan.shape[:2]):
                engine.fetch(Cell(0, m, layer))
                engine.wait_weights(Cell(0, m, layer))
            dist.barrier()

        return fetch_all

    with closing(engine("host")) as host, closing(engine("direct")) as direct:
        seconds = compare(fetching(host), fetching(direct), pairs=3 * pairs)
    return {"host_over_direct": round(seconds.ratio, 4), "host_over_direct_pairs": seconds.shown()}
