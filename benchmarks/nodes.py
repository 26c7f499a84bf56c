"""Plans across nodes: seconds of a step as four methods serve it, on nodes that this machine makes of itself.

Each topology is a `NodeLab` whose links have a given rate, so that what crosses nodes takes real time. Recompute and
update of the same micro-steps run in turn as *static* (every expert at its home), *eplb* (placed by the loads of the
step before, two slots), *balanced* (levelled alone, two slots) and *traffic* (levelled and placed by the bytes on the
links, eight slots). On the clock is all that a method does within a step: planning, but for EPLB, which has also moved
its homes before, publishing, schedules and fetches.

*Predicted* is what the simulator makes of the same plans, without publishing and planning, with rates fitted to the
same pass of other steps on the same nodes: static ones and ones against traffic, of other draws. Plans are priced by
one fit to both passes. *Bytes* are those that the kernel counted on all links, *link_busy* is the share of a step
that the busiest link takes for its own at its rate, and *weights* the share of weights and gradients among the bytes:
what does not go with rows that cross, and is not sent in a static step either.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from benchmarks.harness import node_lab
from benchmarks.harness.node_lab import NodeLab
from benchmarks.harness.node_steps import MICRO_STEPS, SIZES, TOKENS, Nodes, SpreadModel, drawn_counts
from benchmarks.harness.pairs import PairedRatio, seconds_in_turn
from benchmarks.harness.planner_oracles import CellHosts
from benchmarks.harness.spread_bench import SpreadBench
from benchmarks.harness.step_prediction import (
    PASSES,
    TimedStep,
    fitted_costs,
    processes_config,
    simulated_seconds,
    time_steps,
)
from foreroute import planner
from foreroute.costs import hardware_preset, model_preset
from foreroute.costs.links import served_loads
from foreroute.costs.model import CostModel
from foreroute.costs.pricing import ALL_TO_ALL, step_parts
from foreroute.plan import PlanOptions, StepPlan, Topology
from foreroute.plan.counts import counts_digest
from foreroute.plan.hosts import CellPlan, Hosts
from foreroute.plan.options import PassName
from foreroute.simulate import SimulateConfig
from foreroute.simulate.balancers import BalancerInput
from foreroute.simulate.eplb import eplb_previous
from foreroute.simulate.workload import WORKLOADS

TOPOLOGIES = {
    "hf_2x1": Nodes(2, 1, 60e6),
    "hf_2x2": Nodes(2, 2, 120e6),
    "hf_4x1": Nodes(4, 1, 70e6),
    "hf_4x1_fast": Nodes(4, 1, 200e6),
    "megatron_4x1": Nodes(4, 1, 70e6, "megatron"),
    "megatron_2x2": Nodes(2, 2, 120e6, "megatron"),
}
"""By executor, nodes and ranks of each."""
OF_QUICK = ("hf_2x1", "megatron_4x1")
SLOTS = {"eplb": 2, "balanced": 2, "traffic": 8}
OPTIONS = {
    "static": PlanOptions(replicas=False),
    "balanced": PlanOptions(traffic=False),
    "traffic": PlanOptions(traffic=True),
}
EXCHANGES: dict[PassName, int] = {"recompute": 2, "update": 6}
"""How often the rows of a cell travel on Hugging Face: there and back in forward, recomputation and backward."""
OTHER_SEEDS = {1: False, 2: True}
"""Of the steps that rates are fitted to, and whether they keep to home; none is a step that is predicted."""


class Effort(NamedTuple):
    """Amount of work: rounds of the methods and of other steps, sequences of a rank in a micro-step of each."""

    rounds: int
    sequences: int
    other_rounds: int
    other_sequences: tuple[int, ...]


FULL, QUICK = Effort(16, 4, 3, (2, 6)), Effort(2, 1, 1, (1, 2))


def run(*, quick: bool) -> dict[str, Any]:
    """The figures of every topology; of one on each executor, in two rounds of small steps, if `quick`."""
    effort = QUICK if quick else FULL
    result: dict[str, Any] = {
        "metrics": {},
        "baselines": {"link_busy_on_h100": _busy_on_h100()},
        "setting": {"sizes": SIZES._asdict(), "tokens": TOKENS, "micro_steps": MICRO_STEPS, "slots": SLOTS}
        | effort._asdict()
        | {"bytes_per_s": {name: nodes.bytes_per_s for name, nodes in TOPOLOGIES.items()}},
    }
    if reason := node_lab.reason_against():
        return result | {"skipped": reason}
    for name in OF_QUICK if quick else TOPOLOGIES:
        nodes = TOPOLOGIES[name]
        with NodeLab(nodes.num_nodes, nodes.bytes_per_s) as lab:
            found = lab.run(measured, ranks_per_node=nodes.ranks_per_node, args=(nodes, effort))
        result["metrics"][name] = found
    result["metrics"] |= _quality(result["metrics"])
    return result


def measured(rank: int, num_ranks: int, nodes: Nodes, effort: Effort) -> dict[str, Any]:
    """Measure a topology, on one rank. Methods take turns in a round, each time from another one on."""
    config = _config(nodes)
    with closing(SpreadModel.over(nodes)) as model, closing(SpreadModel.over(nodes)) as of_eplb:
        others = time_steps(_others(model, nodes, effort.other_sequences), rounds=effort.other_rounds)
        costs = _of_rank_0(lambda: fitted_costs(others, config))
        by_pass = {pass_name: _of_rank_0(partial(fitted_costs, others, config, [pass_name])) for pass_name in PASSES}
        step = model.second_step(seed=0, sequences=effort.sequences)
        eplb = _eplb(nodes, step, effort.sequences)
        # a model of its own, since homes of the other stay
        of_eplb.routed.move_homes(eplb.home_LE)
        plans = {name: _plan(nodes, step, name, costs) for name in ("static", "balanced", "traffic")} | {"eplb": eplb}
        methods: dict[str, Callable[[bool], None]] = {
            "static": partial(_run, step, None),
            "eplb": partial(_run, of_eplb.second_step(seed=0, sequences=effort.sequences), eplb),
            **{name: partial(_plan_and_run, nodes, step, name, costs) for name in ("balanced", "traffic")},
        }
        cases = {name: TimedStep(name, step.counts_MLGE, plans[name]) for name in methods}
        found: dict[str, Any] = {
            pass_name: _of_pass(methods, cases, pass_name, nodes, effort.rounds, (config, by_pass[pass_name]))
            for pass_name in PASSES
        }
    return found


def _of_pass(
    methods: Mapping[str, Callable[[bool], None]],
    cases: Mapping[str, TimedStep],
    pass_name: PassName,
    nodes: Nodes,
    rounds: int,
    rates: tuple[SimulateConfig, CostModel],
) -> dict[str, Any]:
    """Measure one pass: by method, its seconds over static ones, what was predicted, and what the links carried."""
    works = {name: partial(_together, run, PASSES[pass_name]) for name, run in methods.items()}
    seconds = seconds_in_turn(works, rounds=rounds)
    carried = {name: _carried_by(work, nodes) for name, work in works.items()}
    predicted = dict(zip(cases, simulated_seconds(list(cases.values()), pass_name, *rates), strict=True))
    crossing = {name: _crossing(case, pass_name) for name, case in cases.items()}
    static_bytes = carried["static"][0]
    # of transformers' model FSDP2 sends the dense weights and gradients over the same links
    is_hf = nodes.executor == "hf"
    row_bytes = crossing["static"] * 4 * SIZES.hidden * EXCHANGES[pass_name] if is_hf else static_bytes
    found: dict[str, Any] = {}
    for name in methods:
        all_bytes, busiest_bytes = carried[name]
        median_s = statistics.median(seconds[name])
        without_weights = static_bytes - row_bytes + crossing[name] / crossing["static"] * row_bytes
        traffic = {
            "bytes": all_bytes,
            "link_busy": round(busiest_bytes / nodes.bytes_per_s / median_s, 3),
            "weights": round(1 - without_weights / all_bytes, 3),
        }
        if name == "static":
            shown = {"seconds": round(median_s, 4), "predicted_s": round(float(predicted[name]), 4)}
            found[name] = shown | traffic
        else:
            ratio = PairedRatio.of(seconds[name], seconds["static"]).shown()
            share = round(float(predicted[name] / predicted["static"]), 4)
            found[f"{name}_over_static"] = ratio | {"predicted": share} | traffic
    return found


def _together(run: Callable[[bool], None], updating: bool) -> None:
    """Run it on all ranks together: begun when all are there, over when it is over on all."""
    dist.barrier()
    run(updating)
    dist.barrier()


def _seconds(run: Callable[[bool], None], updating: bool) -> float:
    begun = time.perf_counter()
    _together(run, updating)
    return time.perf_counter() - begun


def _others(
    model: SpreadModel, nodes: Nodes, sequences_of: Sequence[int]
) -> list[tuple[TimedStep, Callable[[bool], float]]]:
    """Other steps, to fit rates to, and what times them."""
    found: list[tuple[TimedStep, Callable[[bool], float]]] = []
    for (seed, at_home), sequences in itertools.product(OTHER_SEEDS.items(), sequences_of):
        step = model.second_step(seed=seed, sequences=sequences, at_home=at_home)
        for name in ("static", "traffic"):
            plan = _plan(nodes, step, name, _config(nodes).described().costs)
            run = partial(_run, step, None if name == "static" else plan)
            timed = TimedStep(f"{name}, seed {seed}, {sequences} sequences", step.counts_MLGE, plan)
            found.append((timed, partial(_seconds, run)))
    return found


def _topology(nodes: Nodes, name: str) -> Topology:
    return replace(_config(nodes).described().topology, redundant_slots=SLOTS.get(name, 0))


def _plan(nodes: Nodes, step: SpreadBench, name: str, costs: CostModel) -> StepPlan:
    """Plan by a method of `OPTIONS`."""
    topology = replace(_topology(nodes, name), links=costs.hardware.links)
    return planner.plan(step.counts_MLGE, topology, OPTIONS[name], home_LE=step.routed.home_LE, costs=costs)


def _plan_and_run(nodes: Nodes, step: SpreadBench, name: str, costs: CostModel, updating: bool) -> None:
    _run(step, _plan(nodes, step, name, costs), updating)


def _run(step: SpreadBench, plan: StepPlan | None, updating: bool) -> None:
    step.step(plan, updating=updating)


def _eplb(nodes: Nodes, step: SpreadBench, sequences: int) -> StepPlan:
    """Placed once, by the loads of the step before."""
    loads_LE = drawn_counts(nodes, seed=0, step=0, sequences=sequences).sum(axis=(0, 2), dtype=np.int64)
    problem = BalancerInput(step.counts_MLGE, _topology(nodes, "eplb"), step.routed.home_LE, loads_LE)
    return executable(problem, list(eplb_previous(problem)))


def executable(problem: BalancerInput, cells: Sequence[CellPlan]) -> StepPlan:
    """Make a plan that an executor takes of a balancer's placement: as many homes on all ranks, and slots."""
    num_layers, num_ranks = len(problem.home_LE), problem.topology.num_ranks
    home_LE = np.stack([_homes(cell, num_ranks) for cell in cells[:num_layers]])
    found = [
        _with_home(cell, home_LE[number % num_layers], counts_GE, is_first=number < num_layers)
        for number, (cell, (_, counts_GE)) in enumerate(zip(cells, problem.cells(), strict=True))
    ]
    loads = [cell.loads_G(counts_GE).max() for cell, (_, counts_GE) in zip(found, problem.cells(), strict=True)]
    shape = problem.counts_MLGE.shape[:2]
    least_ML = problem.counts_MLGE.sum(axis=(2, 3)) / num_ranks
    return StepPlan(
        topology=problem.topology,
        previous_home_LE=home_LE,
        hosts=Hosts.of_cells(home_LE, found),
        max_load_ML=np.array(loads, np.int64).reshape(shape),
        bound_ML=least_ML,
        counts_digest=counts_digest(problem.counts_MLGE),
        slots="layer",
    )


def _homes(cell: CellPlan, num_ranks: int) -> NDArray[np.int16]:
    """int16 [E], a host of each expert where there can be one, E / G experts on every rank."""
    num_experts = len(cell.home_E)
    serves_EG = np.zeros((num_experts, num_ranks), np.bool_)
    serves_EG[np.arange(num_experts), cell.home_E] = True
    serves_EG[cell.expert_R, cell.rank_R] = True
    # an expert costs 1 on a rank that does not serve it: the cheapest matching keeps most where they are
    places_EP = np.repeat(~serves_EG, num_experts // num_ranks, axis=1)
    _, place_E = linear_sum_assignment(places_EP)
    home_E: NDArray[np.int16] = (place_E // (num_experts // num_ranks)).astype(np.int16)
    return home_E


def _with_home(
    cell: CellPlan, home_E: NDArray[np.int16], counts_GE: NDArray[np.integer], *, is_first: bool
) -> CellPlan:
    """Make another host of each expert its home; slots are filled by the first cell of a layer."""
    hosts = CellHosts.of(cell, counts_GE)
    expert_H, rank_H = hosts.expert_H, hosts.rank_H
    is_replica_H = rank_H != home_E[expert_H]
    order_R = np.lexsort((rank_H[is_replica_H], expert_H[is_replica_H]))
    expert_R, rank_R = expert_H[is_replica_H][order_R], rank_H[is_replica_H][order_R]
    slot_R = np.empty(len(rank_R), np.int16)
    for rank in np.unique(rank_R):
        slot_R[rank_R == rank] = np.arange((rank_R == rank).sum())
    return CellPlan(
        home_E,
        expert_R.astype(np.int16),
        rank_R.astype(np.int16),
        slot_R,
        np.full(len(slot_R), is_first),
        hosts.tokens_HG[is_replica_H][order_R].astype(np.int32),
    )


def _of_rank_0(work: Callable[[], CostModel]) -> CostModel:
    """Give all ranks what it returns there."""
    found = [work() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


def _carried_by(work: Callable[[], object], nodes: Nodes) -> tuple[int, int]:
    """Bytes that all links of nodes carried, and the busiest in its busier direction."""
    before = node_lab.carried_bytes()
    work()
    mine = [after - begun for after, begun in zip(node_lab.carried_bytes(), before, strict=True)]
    gathered = [torch.zeros(2, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor(mine))
    of_nodes = torch.stack(gathered[:: nodes.ranks_per_node])
    return int(of_nodes[:, 0].sum()), int(of_nodes.max())


def _crossing(case: TimedStep, pass_name: PassName) -> int:
    """Assignments that are served on another node than their token's."""
    hosts, ranks_per_node = case.plan.in_pass(pass_name).hosts, case.plan.topology.ranks_per_node
    _, crossing_ML, _ = served_loads(hosts, case.counts_MLGE, ranks_per_node)
    return int(crossing_ML.sum())


def _config(nodes: Nodes) -> SimulateConfig:
    return processes_config(
        SIZES,
        nodes.num_ranks,
        slots=max(SLOTS.values()),
        sequence_tokens=TOKENS,
        paths=nodes.paths,
        ranks_per_node=nodes.ranks_per_node,
        cluster_bytes_per_s=nodes.bytes_per_s / nodes.ranks_per_node,
        replica_s=1e-4,
    )


def _busy_on_h100() -> dict[str, dict[str, float]]:
    """Share of a static step for which the busiest NIC is busy, modelled: 16 H100 on two nodes, a NIC for two GPUs."""
    hardware = hardware_preset("h100")
    links = replace(hardware.links, cluster_bytes_per_s=hardware.links.cluster_bytes_per_s / 2)
    model, load = model_preset("qwen3-30b-a3b"), replace(WORKLOADS["G16"], num_micro_steps=4, num_layers=4)
    counts = load.draw(seed=0).counts()
    topology, shares = Topology(16, 8, 0, links), {}
    home_LE = np.tile(topology.contiguous_home_E(load.num_experts), (counts.shape[1], 1))
    at_home = Hosts.with_room(home_LE, len(counts), 16, 0)
    for dispatcher in ("copies", "dedup"):
        costs = CostModel(model=model, hardware=replace(hardware, links=links), dispatcher=dispatcher)
        parts_SP = step_parts(at_home, counts, topology, costs)
        busy_S = parts_SP[:, ALL_TO_ALL] / parts_SP.sum(axis=1)
        shares[dispatcher] = dict(zip(PASSES, busy_S.round(3).tolist(), strict=True))
    return shares


def _quality(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Median error of the predicted ratios, and how far predictions order pairs of cells as their seconds do.

    Pairs whose 95 % intervals overlap are left out; the rank correlation is Kendall's over the others.
    """
    cells = [
        ratio
        for of_topology in metrics.values()
        for pass_name in PASSES
        for name, ratio in of_topology[pass_name].items()
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
