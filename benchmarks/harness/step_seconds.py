"""Seconds of a planned step over those of a static one, on two processes with a core each, where expert GEMMs dominate.

The model is small in layers and large in experts, so that fetching a replica is little beside the rows that it serves,
as on a cluster. A planned step counts its rows, publishes its weights and makes its plan on the clock, in each pass
anew, though an update under the plan of its recompute need not. Whether it goes by the plan or at homes is decided by
rates that `foreroute measure` finds in the same run. *Static* has every expert at its home, and does none of
this. *Predicted* is what the simulator makes of the very same plans, without publishing and planning, with rates that
were fitted to other skews and sizes on the same processes.

On Hugging Face backward passes compute activations anew. *Balanced* are as many tokens on uniform routes, at home.
*Does not pay* are steps of few rows, where replicas are fetched for too little. On Megatron-Core (`megatron_plan`)
nothing is computed anew.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.harness.models import Sizes, spread_model
from benchmarks.harness.pairs import compare
from benchmarks.harness.spread_bench import HFBench, SpreadBench, in_processes, measured_cluster
from benchmarks.harness.step_prediction import PASSES, TimedStep, predict_ratios, processes_config, time_steps
from foreroute.adapters import hf
from foreroute.costs.cluster_file import Cluster, cluster_toml
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.plan import PlanOptions
from foreroute.plan.capabilities import FetchPath
from foreroute.simulate import SimulateConfig

SIZES = Sizes(hidden=512, heads=4, kv_heads=2, experts=16, top_k=4, expert_width=512)
SHAPE, MICRO_STEPS = (8, 256), 2
"""Sequences and tokens of a micro-batch, and how many make a step."""
MILD = {"slight": 0.4, "mild": 0.8}
"""Exponents of Zipf's law; static imbalance about 1.1 and 1.2 on two ranks."""
SKEWS = {"high": 1.0}
"""The same about 1.8. It is compared with forced balance too."""
OTHER_SKEWS, OTHER_SEQUENCES, ROUNDS = (0.15, 0.8), (4, 12), 1
"""Of the steps that rates are fitted to, and how often each is run; none is a step that is predicted."""
FEW_ROWS = (1, 16)
"""A micro-batch with four rows for each expert."""
PLANNED, STATIC = PlanOptions(tolerance=0.0), PlanOptions(replicas=False)
LEVEL_SLOTS = 3
"""What levels all of these loads; with two, 1.17 times the mean are left of "high"."""
NAMES = (
    *("planned_over_static", "planned_over_balanced", "static_imbalance", "does_not_pay"),
    *("predicted_planned_over_static", "gains", "rates"),
)
Draw = Callable[..., SpreadBench]
"""Makes a bench on other routes, as `SpreadBench.drawn` does of its model."""


class Measured(NamedTuple):
    """Figures of rank 0; what was planned and static in each case; and other steps, timed."""

    figures: dict[str, Any]
    cases: dict[str, list[TimedStep]]
    others: list[TimedStep]


def step_seconds(pairs: int) -> dict[str, Any]:
    """Measure `planned_over_static` by pass and skew, predict it, and find what goes with it.

    Beside them `planned_over_balanced` and `static_imbalance` by skew, `gains`, by which the default decides, by pass
    and skew, the measured `rates`, and `does_not_pay` by why and pass. Ratios are medians over pairs that were run in
    turn, with the 95 % interval of the median. Without pairs, or two cores, all are None.
    """
    config = processes_config(SIZES, 2, slots=LEVEL_SLOTS, sequence_tokens=SHAPE[1])
    return with_predictions(_measured, pairs, config, NAMES)


def with_predictions(
    measure: Callable[..., Measured], pairs: int, config: SimulateConfig, names: Sequence[str]
) -> dict[str, Any]:
    """Run `measure(rank, num_ranks, pairs, path)` of a topology file on two processes, and predict its cases.

    Without pairs, or two cores, each of `names` is None.
    """
    if not pairs or len(os.sched_getaffinity(0)) < 2:
        return dict.fromkeys(names)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(cluster_toml(config.described()), encoding="utf-8")
        found: Measured = in_processes(measure, 2, pairs, path)
    return found.figures | {"predicted_planned_over_static": predict_ratios(found.others, found.cases, config)}


def own_core(rank: int) -> None:
    """Keep this process to a core of its own."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})


def planned_over_static(draw: Draw, cluster: Cluster, pairs: int) -> tuple[dict[str, Any], dict[str, list[TimedStep]]]:
    """Measure every skew in both passes; return figures, and the planned and the static step of each skew."""
    found: dict[str, Any] = {name: {each: {} for each in PASSES} for name in ("planned_over_static", "gains")}
    found["static_imbalance"], cases = {}, {}
    for name in (*MILD, *SKEWS):
        bench = draw(skew=SKEWS.get(name, 0.0), zipf=MILD.get(name, 0.0), cluster=cluster)
        plan, home = bench.plan(PLANNED), bench.plan(STATIC)
        cases[name] = [TimedStep(name, bench.counts_MLGE, one) for one in (plan, home)]
        mean = bench.counts_MLGE.sum() / plan.topology.num_ranks
        found["static_imbalance"][name] = round(float(home.max_load_ML.sum() / mean), 3)
        for pass_name, updating in PASSES.items():
            found["planned_over_static"][pass_name][name] = _ratio(bench, bench, updating, pairs)
            found["gains"][pass_name][name] = round(plan.gains[pass_name], 4)
    return found, cases


def other_steps(draw: Draw, sequences: tuple[int, ...], tokens: int) -> list[TimedStep]:
    """Time steps of other skews and sizes, planned and static."""
    steps = []
    for skew, size in itertools.product(OTHER_SKEWS, sequences):
        bench = draw(skew=skew, shape=(size, tokens))
        for options in (PLANNED, STATIC):
            plan = bench.plan(options)
            timed = TimedStep(f"skew {skew}, {size} sequences", bench.counts_MLGE, plan)
            steps.append((timed, partial(bench.seconds, plan if options is PLANNED else None)))
    return time_steps(steps, rounds=ROUNDS)


def recomputing_model(sizes: Sizes = SIZES, paths: FetchPath = "host") -> hf.RoutedTransformer:
    """Build a model over all ranks, which computes activations anew in backward."""
    routed = hf.attach(spread_model(sizes, recomputes=True))
    routed.use(TransferOptions(paths))
    return routed


def _draw(routed: hf.RoutedTransformer) -> Draw:
    return partial(HFBench.drawn, routed.model, routed, micro_steps=MICRO_STEPS, slots=LEVEL_SLOTS)


def _measured(rank: int, num_ranks: int, pairs: int, path: Path) -> Measured:
    own_core(rank)
    cluster = measured_cluster(path, SHAPE[0] * SHAPE[1])
    with closing(recomputing_model()) as routed:
        draw = partial(_draw(routed), shape=SHAPE)
        found, cases = planned_over_static(draw, cluster, pairs)
        even = draw(skew=0.0)
        found["planned_over_balanced"] = {
            name: _ratio(draw(skew=skew, cluster=cluster), even, True, pairs) for name, skew in SKEWS.items()
        }
        few = draw(skew=SKEWS["high"], shape=FEW_ROWS, cluster=cluster)
        found |= {
            "does_not_pay": {"few_rows": _by_pass(few, pairs)},
            "rates": tomllib.loads(path.read_text(encoding="utf-8")),
        }
        return Measured(found, cases, other_steps(draw, OTHER_SEQUENCES, SHAPE[1]))


def _by_pass(bench: SpreadBench, pairs: int) -> dict[str, Any]:
    """Measure seconds planned over static."""
    return {pass_name: _ratio(bench, bench, updating, pairs) for pass_name, updating in PASSES.items()}


def _ratio(bench: SpreadBench, other: SpreadBench, updating: bool, pairs: int) -> dict[str, float | None]:
    """Measure seconds of a step, counted, published, planned and executed, over those of another at homes.

    Beside the ratio and its interval `before`, the share of it that passes before the first row.
    """
    before_s: list[float] = []
    found = compare(
        lambda: before_s.append(bench.paid_step(PLANNED, updating=updating)),
        lambda: other.unplanned_step(updating=updating),
        pairs=pairs,
    )
    return found.shown() | {"before": round(median(before_s[1:]) * 1e3 / found.baseline_ms, 4)}
