"""A configuration in, the record of one step under every method out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from foreroute.costs.cluster_file import Cluster
from foreroute.costs.model import CostModel
from foreroute.errors import ConfigError
from foreroute.simulate.balancers import Balancer
from foreroute.simulate.config import SimulateConfig
from foreroute.simulate.engine import PARTS, GroupRun
from foreroute.simulate.ep_group import EPGroup
from foreroute.simulate.methods import (
    DEFAULT_METHODS,
    METHODS,
    Loads,
    ServedStep,
    forced_balance,
    not_executed,
    serve,
)
from foreroute.simulate.optimizer_step import move_seconds, optimizer_seconds, reduction_bytes, reduction_seconds
from foreroute.simulate.records import PhaseSeconds, SimulatedMethod, SimulationRecord, load_figures
from foreroute.simulate.steps import group_steps

OnProgress = Callable[[str, int, int], None]
"""Called with what is simulated, how much of it is done, and how much there is in all."""
Runs = tuple[GroupRun, GroupRun]
"""Recompute and update of one group."""
WAITING = PARTS.index("waiting for the plan")


def simulate(
    config: SimulateConfig, *, balancers: Mapping[str, Balancer] | None = None, on_progress: OnProgress | None = None
) -> SimulationRecord:
    """Simulate one RL step from the end of the rollout, under every method of the configuration, on the same tokens.

    Planning is really done, here and now; everything else is computed from the cost model.

    Args:
        config: of the simulation.
        balancers: of yours, by short name, after the methods of the configuration.
        on_progress: told of every method that is simulated.

    Raises:
        ConfigError, TopologyError, CountsError: when the configuration describes what cannot be.
    """
    cluster, overlap = config.described(), config.execution.overlap
    # what is configured is not timed
    most_timings = 3 if config.execution.planning_s is None else 1
    steps = list(group_steps(config, cluster.topology, cluster.costs))
    methods = _methods(config, dict(balancers or {}), has_previous=steps[0].previous_LE is not None)
    forced: list[Runs] = []
    bound: list[Runs] = []
    served: dict[str, list[_ServedGroup]] = {name: [] for name in methods}
    done, total = 0, len(steps) * len(methods)
    for step in steps:
        # the limits are of the same tokens, so that shares of them compare like with like
        level = EPGroup.of(forced_balance(step), step, cluster.costs, overlap=overlap)
        forced.append(level.run())
        bound.append(level.bound().run())
        for name, method in methods.items():
            if on_progress is not None:
                on_progress(method.label, done, total)
            planned = serve(method, step, cluster.costs, most_timings=most_timings)
            group = EPGroup.of(planned, step, cluster.costs, overlap=overlap)
            served[name].append(_ServedGroup.of(group, planned, config))
            done += 1
    if on_progress is not None:
        on_progress("done", total, total)
    # as of methods: all groups wait for the slowest one in each pass
    limits = (sum(_slowest(forced)), sum(_slowest(bound)))
    # static is the first of all methods, and the others are compared with it
    records: list[SimulatedMethod] = []
    for name, method in methods.items():
        static = records[0] if records else None
        records.append(_method(name, method, served[name], limits, static, config, cluster))
    # all layers have the same tokens
    counts = np.concatenate([step.counts_MLGE[:, 0] for step in steps])
    return SimulationRecord(
        facts=_facts(config, cluster.costs),
        gpus=config.cluster.gpus,
        expert_parallel=config.cluster.expert_parallel,
        groups=config.cluster.groups,
        groups_simulated=len(steps),
        tokens_per_rank=float(counts.sum(axis=2).mean() / cluster.costs.model.top_k),
        cells_per_group=len(steps[0].counts_MLGE) * cluster.costs.model.num_layers,
        forced_balance_s=limits[0],
        bound_s=limits[1],
        rollout_s=config.execution.rollout_s,
        methods=tuple(records),
    )


def _methods(config: SimulateConfig, balancers: dict[str, Balancer], *, has_previous: bool) -> dict[str, Balancer]:
    """Methods to simulate. Those that plan from the step before are left out where all are asked for by default."""
    if taken := sorted({"forced_balance", "bound", *METHODS} & set(balancers)):
        raise ConfigError(f"balancers are called {', '.join(taken)}, which are names of our own; expected others")
    methods = {name: METHODS[name] for name in config.methods} | balancers
    if has_previous:
        return methods
    known = {name: how for name, how in methods.items() if how.knows != "previous step"}
    is_default = config.methods == DEFAULT_METHODS
    if asked := [name for name in methods if name not in known and (name in balancers or not is_default)]:
        raise ConfigError(
            f"{', '.join(asked)} needs the loads of the step before, which workload.counts does not have; give "
            "workload.previous_counts, or other methods"
        )
    return known


class _ServedGroup(NamedTuple):
    """One group under one method: its runs, what surrounds them, and its loads."""

    runs: Runs
    planning_s: float
    home_moves_s: float
    publish_s: float
    loads: Loads
    home_moves: int
    moved_bytes: dict[str, dict[str, float]]

    @classmethod
    def of(cls, group: EPGroup, served: ServedStep, config: SimulateConfig) -> _ServedGroup:
        """Run the group."""
        execution, topology, costs = config.execution, group.topology, group.costs
        # Layers that were drawn stand for all, and planning takes as long for one as for another.
        scale = costs.model.num_layers / served.counts_MLGE.shape[1]
        # but a search for a packing, which looks at as many numbers however many layers there are
        is_packed_anew = served.counts_MLGE is not group.step.counts_MLGE
        planned_s = served.planning_s * (1.0 if is_packed_anew else scale)
        planning_s = planned_s if execution.planning_s is None else execution.planning_s
        return cls(
            runs=group.run(ready_s=max(planning_s - execution.plan_lead_s, 0.0)),
            planning_s=planning_s,
            home_moves_s=move_seconds(served.before_LE, served.home_LE, scale, topology, costs),
            # once for both passes, and not at all where both run at homes
            publish_s=max(costs.publish_seconds(hosts, topology) for hosts in served.passes) * scale,
            loads=served.loads(topology),
            home_moves=round(served.home_moves * scale),
            moved_bytes=group.moved_bytes(),
        )


def _method(
    name: str,
    method: Balancer,
    groups: list[_ServedGroup],
    limits: tuple[float, float],
    static: SimulatedMethod | None,
    config: SimulateConfig,
    cluster: Cluster,
) -> SimulatedMethod:
    """Put the groups of a method together: all wait for the slowest after each pass."""
    topology, costs = cluster.topology, cluster.costs
    runs = [group.runs for group in groups]
    slowest = [max(of_groups, key=_seconds) for of_groups in zip(*runs, strict=True)]
    recompute_s, update_s = _slowest(runs)
    training_s = recompute_s + update_s
    phases = PhaseSeconds(
        # only what the recompute waits for: the rest of planning ran beside the rollout
        planning=max(run.end_s for run, _ in runs) - recompute_s,
        home_moves=max(group.home_moves_s for group in groups),
        publishing=max(group.publish_s for group in groups),
        recompute=recompute_s,
        update=update_s,
        reduction=reduction_seconds(config.cluster, topology, costs),
        optimizer=optimizer_seconds(config.cluster, topology, costs),
    )
    # the same under every method: no plan changes what data parallelism reduces
    reduced = {"gradients and weights of data parallelism": reduction_bytes(config.cluster, topology, costs)}
    hours = (sum(phases) + config.execution.rollout_s) * config.cluster.gpus / 3600
    return SimulatedMethod(
        name=name,
        label=method.label,
        **load_figures([group.loads for group in groups]),
        recompute_parts=dict(zip(PARTS, slowest[0].parts_X.tolist(), strict=True)),
        update_parts=dict(zip(PARTS, slowest[1].parts_X.tolist(), strict=True)),
        home_moves=max(group.home_moves for group in groups),
        planning_s=max(group.planning_s for group in groups),
        not_executed=not_executed(method, config),
        phases=phases,
        share_of_forced_balance=limits[0] / training_s,
        share_of_bound=limits[1] / training_s,
        speedup_over_static=1.0 if static is None else static.training_s / training_s,
        moved_bytes=_means([group.moved_bytes for group in groups]) | reduced,
        gpu_hours=hours,
        gpu_hours_saved=0.0 if static is None else static.gpu_hours - hours,
    )


def _means(groups: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        what: {link: float(np.mean([group[what][link] for group in groups])) for link in by_link}
        for what, by_link in groups[0].items()
    }


def _slowest(runs: Sequence[Runs]) -> list[float]:
    """Seconds of the slowest group's recompute, and of the slowest group's update: all wait for all between the two."""
    return [max(_seconds(run) for run in of_groups) for of_groups in zip(*runs, strict=True)]


def _seconds(run: GroupRun) -> float:
    """To the last event, waiting for the plan aside."""
    return float(run.end_s - run.parts_X[WAITING])


PATH_WORDS = {"host": "from host memory within a node, from peers beyond", "direct": "from peers"}


def _facts(config: SimulateConfig, costs: CostModel) -> dict[str, str]:
    cluster, model, load = config.cluster, costs.model, config.workload
    hardware = config.hardware.get("preset", "GPUs of rates of their own")
    skew = "" if load.skew == 1 else f", skew {load.skew:g}"
    return {
        "cluster": f"{cluster.gpus} x {hardware}, expert parallel {cluster.expert_parallel}, "
        f"{cluster.groups} group{'s' * (cluster.groups != 1)}",
        "model": f"{config.model.get('preset', 'sizes of its own')}: {model.num_layers} routed layers, "
        f"top-{model.top_k} of {model.num_experts} experts of {model.expert_bytes / 1e6:.1f} MB",
        "workload": f"drawn, preset {load.preset}{skew}" if load.are_drawn else load.counts or ", ".join(load.traces),
        "dispatcher": costs.dispatcher,
        "replicas": f"{PATH_WORDS[costs.paths]}, {costs.prefetch} cell{'s' * (costs.prefetch != 1)} ahead",
        "overlap": f"{config.execution.overlap:g} of the computing time hides all-to-alls",
    }
