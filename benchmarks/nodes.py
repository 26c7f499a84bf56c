"""Seconds across nodes: a step with every expert at home, and as other methods serve it, over links of a given rate.

Nodes are network namespaces of this machine (`harness.node_lab`): rows and weights really cross links that are as slow
as the case says, and processors are those of the machine. Routes are those of the generator whose preset real routes
gave (R8), of sequences that keep to their experts. Everything that a step pays is on the clock: publishing, planning,
schedule, votes; for EPLB, which has moved its homes before the step, publishing and the schedule. *Predicted* is what
the simulator makes of the same plans, without publishing and planning, with rates that were fitted to other steps on
the same nodes. *Bytes* are those that the kernel counted on the links.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from benchmarks.harness import node_lab
from benchmarks.harness.balancer_plans import executable
from benchmarks.harness.execution_bench import measured_cluster
from benchmarks.harness.node_lab import NodeLab
from benchmarks.harness.node_steps import (
    MICRO_STEPS,
    SEQUENCES,
    SIZES,
    TOKENS,
    Nodes,
    SpreadModel,
    Step,
    drawn_counts,
    spread_model,
)
from benchmarks.harness.pairs import PairedRatio, seconds_in_turn
from benchmarks.harness.step_prediction import STAGES, TimedStep, predict_seconds, processes_config, time_steps
from foreroute import planner
from foreroute.costs import hardware_preset, model_preset
from foreroute.costs.cluster_file import cluster_toml
from foreroute.costs.model import CostModel
from foreroute.costs.pricing import ALL_TO_ALL, price_cell
from foreroute.plan import CellPlan, PlanOptions, StepPlan, Topology
from foreroute.simulate import SimulateConfig
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.eplb import eplb_previous
from foreroute.simulate.workload import WORKLOADS

TOPOLOGIES = {
    "hf_2x1": Nodes(2, 1, 25e6),
    "hf_2x2": Nodes(2, 2, 50e6),
    "hf_4x1": Nodes(4, 1, 40e6),
    "hf_4x1_fast": Nodes(4, 1, 160e6),
    "megatron_4x1": Nodes(4, 1, 40e6, "megatron"),
    "megatron_2x2": Nodes(2, 2, 50e6, "megatron"),
}
"""By executor, nodes and ranks of each."""
SLOTS = {"balanced": 2, "traffic": 8, "eplb": 2}
STATIC = PlanOptions(replicas=False)
OPTIONS = {
    "balanced": PlanOptions(tolerance=0.02, traffic=False),
    "traffic": PlanOptions(tolerance=0.02, traffic=True),
}
OTHER_SEEDS, OTHER_SEQUENCES, ROUNDS = (1, 2), (2, 6), 3
"""Of the steps that rates are fitted to; none is a step that is predicted."""


def run(*, quick: bool) -> dict[str, Any]:
    """The figures of every topology; of the first alone, in few rounds, if `quick`."""
    setting = {
        "sizes": SIZES,
        "sequences": SEQUENCES,
        "tokens": TOKENS,
        "micro_steps": MICRO_STEPS,
        "slots": SLOTS,
        "bytes_per_s": {name: nodes.bytes_per_s for name, nodes in TOPOLOGIES.items()},
    }
    if reason := node_lab.reason_against():
        return {"metrics": {}, "baselines": {}, "setting": setting, "skipped": reason}
    rounds, names = (3, ["hf_4x1"]) if quick else (30, list(TOPOLOGIES))
    metrics: dict[str, Any] = {}
    for name in names:
        nodes = TOPOLOGIES[name]
        with NodeLab(nodes.num_nodes, nodes.bytes_per_s) as lab, tempfile.TemporaryDirectory() as folder:
            args = nodes, rounds, Path(folder, "cluster.toml")
            found = lab.run(_measured, ranks_per_node=nodes.ranks_per_node, args=args)
        metrics[name] = _with_predictions(found, nodes)
    return {
        "metrics": metrics | _quality(metrics),
        "baselines": {"link_busy_on_h100": _busy_on_h100()},
        "setting": setting,
    }


@dataclass(frozen=True)
class Found:
    """What the ranks of a laboratory measured.

    Attributes:
        seconds: by stage and method, of each round.
        sent: by stage and method, bytes of all links, and of the busiest.
        cases: by method, what was run.
        others: other steps, timed, to fit rates to.
        figures: imbalance and replicas by method.
    """

    seconds: Mapping[str, Mapping[str, Sequence[float]]]
    sent: Mapping[str, Mapping[str, tuple[int, int]]]
    cases: Mapping[str, TimedStep]
    others: Sequence[TimedStep]
    figures: Mapping[str, Any]


def _measured(rank: int, num_ranks: int, nodes: Nodes, rounds: int, path: Path) -> Found:
    """On one rank. Methods take turns within a round, each time from another one on."""
    pricing = Pricing(nodes, path)
    with closing(spread_model(nodes, rank)) as model, closing(spread_model(nodes, rank)) as of_eplb:
        step = model.step(seed=0)
        eplb = pricing.eplb(step, drawn_counts(nodes, seed=0, step=0))
        of_eplb.move_homes(eplb.home_LE)
        moved = of_eplb.step(seed=0)
        methods: dict[str, Callable[[bool], None]] = {
            "static": partial(step.run, None),
            "eplb": partial(moved.run, eplb),
            **{name: _planned(step, pricing, name) for name in OPTIONS},
        }
        seconds, sent = _in_turn(methods, nodes, rounds)
        plans = {"static": pricing.plan(step, "static"), "eplb": eplb}
        plans |= {name: pricing.plan(step, name) for name in OPTIONS}
        cases = {name: TimedStep(name, step.counts_MLGE, plan) for name, plan in plans.items()}
        others = time_steps(_others(model, pricing), rounds=ROUNDS)
    mean = step.counts_MLGE.sum() / num_ranks
    figures: dict[str, Any] = {
        name: {
            "busiest_over_mean": round(float(plan.max_load_ML.sum() / mean), 3),
            "replicas_of_a_cell": float(plan.num_replicas_ML.mean()),
        }
        for name, plan in plans.items()
    }
    figures |= {"gains": {name: dict(plan.gains) for name, plan in plans.items() if plan.gains}}
    return Found(seconds, sent, cases, others, figures)


def _in_turn(methods: Mapping[str, Callable[[bool], None]], nodes: Nodes, rounds: int) -> tuple[Any, Any]:
    """`seconds` and `sent` of `Found`."""
    seconds: dict[str, dict[str, list[float]]] = {}
    sent: dict[str, dict[str, tuple[int, int]]] = {}
    for stage, updating in STAGES.items():
        works = {name: partial(_together, run, updating) for name, run in methods.items()}
        seconds[stage] = seconds_in_turn(works, rounds=rounds)
        sent[stage] = {name: _sent_by(work, nodes) for name, work in works.items()}
    return seconds, sent


def _together(run: Callable[[bool], None], updating: bool) -> None:
    """It begins when all ranks are there, and is over when it is over on all."""
    dist.barrier()
    run(updating)
    dist.barrier()


def _seconds(run: Callable[[bool], None], updating: bool) -> float:
    begun = time.perf_counter()
    _together(run, updating)
    return time.perf_counter() - begun


class Pricing:
    """How methods plan on a laboratory, by the rates that `foreroute plan --measure` finds there. Made on all ranks."""

    def __init__(self, nodes: Nodes, path: Path) -> None:
        if dist.get_rank() == 0:
            path.write_text(cluster_toml(_config(nodes).described()))
        dist.barrier()
        self._cluster = measured_cluster(path, SEQUENCES * TOKENS)

    def plan(self, step: Step, name: str) -> StepPlan:
        """By a method of `OPTIONS`, or at home."""
        ranks, options = self._topology(name), OPTIONS.get(name, STATIC)
        return planner.plan(step.counts_MLGE, ranks, options, home_LE=step.home_LE, costs=self._cluster.costs)

    def eplb(self, step: Step, before_MLSE: NDArray[np.integer]) -> StepPlan:
        """Placed once, by the loads of the step before."""
        loads_LE = before_MLSE.sum(axis=(0, 2), dtype=np.int64)
        problem = BalancerInput(step.counts_MLGE, self._topology("eplb"), step.home_LE, loads_LE)
        return executable(problem, list(eplb_previous(problem)))

    def _topology(self, name: str) -> Topology:
        return replace(self._cluster.topology, redundant_slots=SLOTS.get(name, 0))


def _planned(step: Step, pricing: Pricing, name: str) -> Callable[[bool], None]:
    return lambda updating: step.run(pricing.plan(step, name), updating)


def _sent_by(work: Callable[[], object], nodes: Nodes) -> tuple[int, int]:
    """Bytes that all links of nodes carried, and the busiest in its busier direction."""
    before = node_lab.carried_bytes()
    work()
    mine = [after - begun for after, begun in zip(node_lab.carried_bytes(), before, strict=True)]
    gathered = [torch.zeros(2, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor(mine))
    of_nodes = torch.stack(gathered[:: nodes.ranks_per_node])
    return int(of_nodes[:, 0].sum()), int(of_nodes.max())


def _others(model: SpreadModel, pricing: Pricing) -> list[tuple[TimedStep, Callable[[bool], float]]]:
    """Other steps, to fit rates to, and what times them."""
    found: list[tuple[TimedStep, Callable[[bool], float]]] = []
    for seed, sequences in itertools.product(OTHER_SEEDS, OTHER_SEQUENCES):
        step = model.step(seed=seed, sequences=sequences)
        for name in ("static", *OPTIONS):
            plan = pricing.plan(step, name)
            run = partial(step.run, None if name == "static" else plan)
            timed = TimedStep(f"{name}, seed {seed}, {sequences} sequences", step.counts_MLGE, plan)
            found.append((timed, partial(_seconds, run)))
    return found


def _config(nodes: Nodes) -> SimulateConfig:
    return processes_config(
        SIZES,
        nodes.num_ranks,
        sequence_tokens=TOKENS,
        paths=nodes.paths,
        ranks_per_node=nodes.ranks_per_node,
        cluster_bytes_per_s=nodes.bytes_per_s / nodes.ranks_per_node,
    )


def _busy_on_h100() -> dict[str, dict[str, float]]:
    """Share of a static step for which the busiest NIC is busy, modelled: 16 H100 on two nodes, a NIC for two GPUs."""
    hardware = hardware_preset("h100")
    links = replace(hardware.links, cluster_bytes_per_s=hardware.links.cluster_bytes_per_s / 2)
    model, load = model_preset("qwen3-30b-a3b"), replace(WORKLOADS["G16"], num_micro_steps=4, num_layers=4)
    cells_CGE = load.draw(seed=0).counts().reshape(-1, 16, load.num_experts)
    topology, shares = Topology(16, 8, 0, links), {}
    at_home = CellPlan.homes_only(topology.contiguous_home_E(load.num_experts), 16)
    for dispatcher in ("copies", "dedup"):
        costs = CostModel(model=model, hardware=replace(hardware, links=links), dispatcher=dispatcher)
        parts_SP = np.sum([price_cell(at_home, each, topology, costs).parts_SP for each in cells_CGE], axis=0)
        busy_S = parts_SP[:, ALL_TO_ALL] / parts_SP.sum(axis=1)
        shares[dispatcher] = dict(zip(STAGES, busy_S.round(3).tolist(), strict=True))
    return shares


def _with_predictions(found: Found, nodes: Nodes) -> dict[str, Any]:
    """By stage and method."""
    config = _config(nodes)
    metrics: dict[str, Any] = {}
    for stage in STAGES:
        names = list(found.cases)
        predicted = dict(
            zip(names, predict_seconds(found.others, list(found.cases.values()), stage, config), strict=True)
        )
        static = found.seconds[stage]["static"]
        static_s = statistics.median(static)
        busy_s = found.sent[stage]["static"][1] / nodes.bytes_per_s
        metrics[stage] = {"static_s": round(static_s, 4), "link_busy": round(busy_s / static_s, 3)}
        for name in names[1:]:
            ratio = PairedRatio.of(found.seconds[stage][name], static)
            share = round(float(predicted[name] / predicted["static"]), 4)
            metrics[stage][f"{name}_over_static"] = ratio.shown() | {"predicted": share}
        metrics[stage]["bytes"] = {name: {"all": a, "busiest": b} for name, (a, b) in found.sent[stage].items()}
    return metrics | {"plans": found.figures}


def _quality(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Median error of the predicted ratios, and how far predictions order pairs of cells as their seconds do.

    Pairs whose 95 % intervals overlap are left out; the rank correlation is Kendall's over the others.
    """
    cells = [
        ratio
        for of_topology in metrics.values()
        for stage in STAGES
        for name, ratio in of_topology[stage].items()
        if name.endswith("_over_static")
    ]
    errors = [abs(cell["predicted"] / cell["median"] - 1) for cell in cells]
    told = [
        np.sign((a["predicted"] - b["predicted"]) * (a["median"] - b["median"]))
        for a, b in itertools.combinations(cells, 2)
        if None not in (a["lower"], b["lower"]) and (a["upper"] < b["lower"] or b["upper"] < a["lower"])
    ]
    return {
        "median_error": round(statistics.median(errors), 4),
        "rank_correlation": round(float(np.mean(told)), 4) if told else None,
    }
