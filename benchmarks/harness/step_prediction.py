"""Steps that were timed on processes, and what the simulator predicts of others with rates that are fitted to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.models import Sizes
from foreroute.costs.fitting import find_rates, require_distinct_effects
from foreroute.costs.model import CostModel
from foreroute.errors import ConfigError
from foreroute.plan import StepPlan
from foreroute.plan.capabilities import FetchPath
from foreroute.plan.options import PassName
from foreroute.simulate import SimulateConfig, parse_config
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.engine import PassWork
from foreroute.simulate.ep_group import EPGroup
from foreroute.simulate.fit import Measurement

PASSES: dict[PassName, bool] = {"recompute": False, "update": True}
"""Whether backward passes follow in it, by pass of a plan."""
RATES = ("gemm_flops_per_s", "memory_bytes_per_s", "layer_s", "node_bytes_per_s")
"""What is fitted to steps of one node, beside the rate of host memory."""


class TimedStep(NamedTuple):
    """A plan of counts [M, L, G, E], and its seconds by pass where it was run."""

    name: str
    counts_MLGE: NDArray[np.integer]
    plan: StepPlan
    seconds: Mapping[str, float] = {}


def time_steps(steps: Sequence[tuple[TimedStep, Callable[[bool], float]]], *, rounds: int) -> list[TimedStep]:
    """Run steps in turn, round after round behind one that warms up; the seconds of each are of its quickest round.

    Activations must be computed anew in backward passes, as in the simulator's update.
    """
    seconds: list[dict[str, list[float]]] = [{pass_name: [] for pass_name in PASSES} for _ in steps]
    for turn in range(rounds + 1):
        for (_, timed), times in zip(steps, seconds, strict=True):
            for pass_name, updating in PASSES.items():
                taken = timed(updating)
                if turn > 0:
                    times[pass_name].append(taken)
    return [
        step._replace(seconds={pass_name: min(times[pass_name]) for pass_name in PASSES})
        for (step, _), times in zip(steps, seconds, strict=True)
    ]


def predict_seconds(
    known: Sequence[TimedStep], asked: Sequence[TimedStep], pass_name: PassName, config: SimulateConfig
) -> NDArray[np.float64]:
    """float64 [asked], simulated seconds of a pass, with rates fitted to the same pass of the known steps."""
    costs = _fitted_costs([_measurement(one, pass_name) for one in known], config)
    return predict_on_processes([_measurement(one, pass_name) for one in asked], config, costs)


def _fitted_costs(measured: Sequence[Measurement], config: SimulateConfig) -> CostModel:
    costs = config.described().costs
    of_memory = ["host_bytes_per_s"] if costs.paths == "host" else []
    seconds_V = np.array([one.seconds for one in measured])

    def fitted(names: Sequence[str]) -> CostModel:
        predicted = partial(predict_on_processes, measured, config)
        found = find_rates(costs, names, predicted, seconds_V, seconds_V)
        require_distinct_effects(found.share_VK, names)
        return found.costs

    try:
        return fitted([*RATES, *of_memory])
    except ConfigError:
        if not of_memory:
            raise
        # only ranks that wait for others fetch by host memory, or none does
        return fitted(RATES)


def predict_on_processes(
    measured: Sequence[Measurement], config: SimulateConfig, costs: CostModel
) -> NDArray[np.float64]:
    """float64 [measured], seconds on processes of this machine, with no copy engines and turns on its processors."""
    return np.array([_seconds_on_processes(one, config, costs) for one in measured])


def _seconds_on_processes(one: Measurement, config: SimulateConfig, costs: CostModel) -> float:
    group = EPGroup.of(one.served, one.step, costs, overlap=config.execution.overlap)
    work = (group.recompute, group.update)[one.pass_index]
    work = in_turns(without_overlap(work), os.cpu_count() or 1)
    return replace(group, recompute=work, update=work).run()[one.pass_index].end_s


def without_overlap(work: PassWork) -> PassWork:
    """Let what a rank sends and receives for a cell take time of its experts, and of nothing beside."""
    # A backward pass computes forward anew, with what the forward one fetched, and then backward; so the forward time
    # has the fetch of the forward pass, and the backward time what the other one fetches beyond it.
    fetch_KMLG = work.host_KMLG + work.direct_KMLG4.sum(-1)
    later_MLG = fetch_KMLG[1] - fetch_KMLG[0] + work.gradient_MLG4.sum(-1)
    experts_MLG2 = work.experts_MLG2 + np.stack([fetch_KMLG[0], later_MLG], axis=-1)
    return work.without_transfers()._replace(experts_MLG2=np.maximum(experts_MLG2, 0))


def in_turns(work: PassWork, processors: int) -> PassWork:
    """Let all ranks share these processors: each part of a pass lasts until the last rank has had its turns."""

    # shortest first: while n ranks are left, each gets processors / n of the time, at most all of it
    def shared(seconds: NDArray[np.float64], ranks: int) -> NDArray[np.float64]:
        work_GX = np.sort(np.moveaxis(seconds, ranks, 0), axis=0)
        # the first to end leave their processors to the others
        slowdown_G = np.maximum(1.0, (len(work_GX) - np.arange(len(work_GX))) / processors)
        steps_GX = np.diff(work_GX, axis=0, prepend=0.0)
        until_X = np.zeros(work_GX.shape[1:])
        for slowdown, steps_X in zip(slowdown_G, steps_GX, strict=True):
            until_X += steps_X * slowdown
        return np.repeat(np.expand_dims(until_X, ranks), len(work_GX), axis=ranks)

    return work._replace(
        attention_MG2=shared(work.attention_MG2, 1),
        head_MG=shared(work.head_MG, 1),
        experts_MLG2=shared(work.experts_MLG2, 2),
    )


def predict_ratios(
    known: Sequence[TimedStep], cases: Mapping[str, Sequence[TimedStep]], config: SimulateConfig
) -> dict[PassName, dict[str, float]]:
    """Predict, by pass and case, seconds of its first step over those of its second."""
    ratios: dict[PassName, dict[str, float]] = {pass_name: {} for pass_name in PASSES}
    for pass_name, of_pass in ratios.items():
        asked = [one for first, second in cases.values() for one in (first, second)]
        seconds = predict_seconds(known, asked, pass_name, config).reshape(-1, 2).tolist()
        of_pass |= {
            name: round(first_s / second_s, 4) for name, (first_s, second_s) in zip(cases, seconds, strict=True)
        }
    return ratios


def processes_config(
    sizes: Sizes,
    num_ranks: int,
    *,
    slots: int,
    sequence_tokens: int,
    paths: FetchPath = "host",
) -> SimulateConfig:
    """The bench model of these sizes on gloo processes of one node, with rates to begin a fit from."""
    width, kv_width = sizes.attention_width, sizes.attention_width // sizes.heads * sizes.kv_heads
    return parse_config(
        {
            "cluster": {"gpus": num_ranks, "expert_parallel": num_ranks, "redundant_slots": slots},
            "model": {
                "num_layers": sizes.layers,
                "num_experts": sizes.experts,
                "top_k": sizes.top_k,
                "hidden": sizes.hidden,
                "intermediate": sizes.expert_width,
                "dense_parameters": 2 * sizes.hidden * (width + kv_width),
                "attention_width": width,
                "vocabulary": sizes.vocabulary,
                "weight_bytes": 4.0,
                "activation_bytes": 4.0,
            },
            "hardware": {
                "gemm_flops_per_s": 2e10,
                "attention_flops_per_s": 2e10,
                "memory_bytes_per_s": 5e9,
                "ranks_per_node": num_ranks,
                "tile_rows": 1,
                "layer_s": 5e-3,
            },
            "links": {
                "node_bytes_per_s": 5e8,
                "cluster_bytes_per_s": 5e8,
                "host_bytes_per_s": 5e9,
                "node_latency_s": 1e-4,
                "cluster_latency_s": 1e-4,
            },
            "costs": {"paths": paths, "sequence_tokens": float(sequence_tokens)},
        },
        source="the benchmark",
    )


def _measurement(one: TimedStep, pass_name: PassName) -> Measurement:
    topology, counts_MLGE = one.plan.topology, one.counts_MLGE
    step = BalancerInput(counts_MLGE, topology, topology.contiguous_home_LE(*counts_MLGE.shape[1::2]))
    return Measurement.of(one.name, step, one.plan, pass_name, one.seconds.get(pass_name, 1.0))
