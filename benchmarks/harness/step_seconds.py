"""Seconds of a planned step over those of a static one, on two processes with a core each, where expert GEMMs dominate.

The model is small in layers and large in experts, so that fetching a replica is little beside the rows that it serves,
as on a cluster; backward passes compute activations anew. A planned step publishes its weights and makes its plan on
the clock, in each pass anew, though an update under the plan of its recompute need not. Whether it goes by the plan
or at homes is decided by rates that `foreroute measure` finds in the same run. *Static* has every expert at its
home, and does neither; *balanced* are as many tokens on uniform routes, at home. *Predicted* is what the simulator
makes of the very same plans, without publishing and planning, with rates that were fitted to other skews and sizes on
the same processes. *Does not pay* are steps of few rows, where replicas are fetched for too little, and four processes
on two cores, which do all of the work whatever the plan.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.execution_bench import Bench, in_processes, measured_cluster, spread_model
from benchmarks.harness.pairs import compare
from benchmarks.harness.step_prediction import (
    PASSES,
    TimedStep,
    executed,
    predict_ratios,
    processes_config,
    time_steps,
)
from foreroute.adapters import hf
from foreroute.costs.cluster_file import cluster_toml
from foreroute.ep.transfer.engine import TransferOptions
from foreroute.plan import PlanOptions
from foreroute.plan.capabilities import FetchPath

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
SHAPE, MICRO_STEPS = (8, 256), 2
"""Sequences and tokens of a micro-batch, and how many make a step."""
MILD = {"least": 0.2, "slight": 0.4, "mild": 0.8}
"""Exponents of Zipf's law; static imbalance about 1.05, 1.1 and 1.2 on two ranks."""
SKEWS = {"low": 0.3, "middle": 0.6, "high": 1.0}
"""The same about 1.3, 1.6 and 1.8. They are compared with forced balance too."""
OTHER_SKEWS, OTHER_SEQUENCES, ROUNDS = (0.15, 0.45, 0.8), (4, 12), 5
"""Of the steps that rates are fitted to, and how often each is run; none is a step that is predicted."""
FEW_ROWS = (1, 16)
"""A micro-batch with four rows for each expert."""
CROWDED_PAIRS = 10
"""Of steps that take four times as long: 95 % is between their second and ninth."""
PLANNED, STATIC = PlanOptions(tolerance=0.0), PlanOptions(replicas=False)
LEVEL_SLOTS = 3
"""What levels all of these loads; with two, 1.09 and 1.17 times the mean are left of "middle" and "high"."""
routed_anew = partial(Bench.routed_anew, micro_steps=MICRO_STEPS, slots=LEVEL_SLOTS)


NAMES = (
    *("planned_over_static", "planned_over_balanced", "static_imbalance", "does_not_pay"),
    *("predicted_planned_over_static", "gains", "rates"),
)


def step_seconds(pairs: int) -> dict[str, Any]:
    """`planned_over_static` and `predicted_planned_over_static` by pass and skew, and what goes with them.

    Beside them `planned_over_balanced` and `static_imbalance` by skew, `gains`, by which the default decides, by pass
    and skew, the measured `rates`, and `does_not_pay` by why and pass. Ratios are medians over pairs that were run in
    turn, with the 95 % interval of the median. Without pairs, or two cores, all are None.
    """
    if not pairs or len(os.sched_getaffinity(0)) < 2:
        return dict.fromkeys(NAMES)
    found: dict[str, Any]
    config = processes_config(SIZES, 2, slots=LEVEL_SLOTS, sequence_tokens=SHAPE[1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(cluster_toml(config.described()))
        found, cases, others = in_processes(_measured, 2, pairs, path)
    found["does_not_pay"]["four_processes_on_two_cores"] = in_processes(_crowded, 4, min(pairs, CROWDED_PAIRS))
    return found | {"predicted_planned_over_static": predict_ratios(others, cases, config)}


def recomputing_model(sizes: Mapping[str, Any] = SIZES, paths: FetchPath = "host") -> hf.RoutedTransformer:
    """A model over all ranks, which computes activations anew in backward."""
    model = spread_model(sizes)
    model.activation_checkpointing_enable()
    routed = hf.attach(model)
    routed.use(TransferOptions(paths))
    return routed


def _measured(
    rank: int, num_ranks: int, pairs: int, path: Path
) -> tuple[dict[str, Any], dict[str, list[TimedStep]], list[TimedStep]]:
    """Ratios of rank 0; what was planned and static in each case; and other steps, timed."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    priced = partial(routed_anew, cluster=measured_cluster(path, SHAPE[0] * SHAPE[1]))
    routed = recomputing_model()
    found: dict[str, Any] = {
        "rates": tomllib.loads(path.read_text()),
        "planned_over_static": {pass_name: {} for pass_name in PASSES},
        "gains": {pass_name: {} for pass_name in PASSES},
        "planned_over_balanced": {},
        "static_imbalance": {},
    }
    cases: dict[str, list[TimedStep]] = {}
    even = routed_anew(routed, rank, skew=0.0, shape=SHAPE)
    for name in (*MILD, *SKEWS):
        bench = priced(routed, rank, skew=SKEWS.get(name, 0.0), zipf=MILD.get(name, 0.0), shape=SHAPE)
        plan, home = bench.plan(PLANNED), bench.plan(STATIC)
        cases[name] = [TimedStep(name, bench.counts_MLGE, one) for one in (plan, home)]
        mean = bench.counts_MLGE.sum() / num_ranks
        found["static_imbalance"][name] = round(float(home.max_load_ML.sum() / mean), 3)
        for pass_name, updating in PASSES.items():
            found["planned_over_static"][pass_name][name] = _ratio(bench, bench, updating, pairs)
            found["gains"][pass_name][name] = round(plan.gains[pass_name], 4)
        if name in SKEWS:
            found["planned_over_balanced"][name] = _ratio(bench, even, True, pairs)
    few = priced(routed, rank, skew=SKEWS["high"], shape=FEW_ROWS)
    found["does_not_pay"] = {"few_rows": _by_pass(few, pairs)}
    others = [
        (
            f"skew {skew}, {sequences} sequences",
            routed_anew(routed, rank, skew=skew, shape=(sequences, SHAPE[1])),
        )
        for skew, sequences in itertools.product(OTHER_SKEWS, OTHER_SEQUENCES)
    ]
    with closing(routed):
        steps = [executed(name, one, one.plan(how)) for name, one in others for how in (PLANNED, STATIC)]
        return found, cases, time_steps(steps, rounds=ROUNDS)


def _crowded(rank: int, num_ranks: int, pairs: int) -> dict[str, Any]:
    """Ratios by pass where processes share cores."""
    bench = routed_anew(recomputing_model(), rank, skew=SKEWS["high"], shape=SHAPE)
    with closing(bench.routed):
        return _by_pass(bench, pairs)


def _by_pass(bench: Bench, pairs: int) -> dict[str, Any]:
    """Seconds planned over static."""
    return {pass_name: _ratio(bench, bench, updating, pairs) for pass_name, updating in PASSES.items()}


def _ratio(bench: Bench, other: Bench, updating: bool, pairs: int) -> dict[str, float | None]:
    """Seconds of a step, published, planned and executed, over those of another with every expert at home.

    Beside the ratio and its interval `before`, the share of it that passes before the first row.
    """
    before_s: list[float] = []
    found = compare(
        lambda: before_s.append(bench.paid_step(PLANNED, updating=updating)),
        lambda: other.unplanned_step(updating=updating),
        pairs=pairs,
    )
    return found.shown() | {"before": round(median(before_s[1:]) * 1e3 / found.baseline_ms, 4)}
