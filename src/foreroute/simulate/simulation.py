"""A configuration in, the record of one step under every method out; and the same with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from foreroute.costs.model import CostModel
from foreroute.errors import ConfigError
from foreroute.plan.topology import Topology
from foreroute.simulate.balancers import Balancer
from foreroute.simulate.config import SimulateConfig, varied
from foreroute.simulate.engine import PARTS, Floats, StageRun
from foreroute.simulate.ep_group import EPGroup, plan_ready
from foreroute.simulate.methods import METHODS, PlannerPreset, ServedStep, forced_balance, not_executed, serve
from foreroute.simulate.optimizer_step import (
    move_seconds,
    optimizer_seconds,
    publish_seconds,
    reduction_bytes,
    reduction_seconds,
)
from foreroute.simulate.records import MethodRecord, SimulationRecord, StageSeconds
from foreroute.simulate.steps import GroupStep, group_steps

OnProgress = Callable[[str, int, int], None]
"""Called with what is simulated, how much of it is done, and how much there is in all."""
OnGroup = Callable[[str, EPGroup], None]
"""Called with the short name of a method and a group as it serves it, for looks into what is simulated."""


def simulate(
    config: SimulateConfig,
    *,
    balancers: Mapping[str, Balancer] | None = None,
    on_progress: OnProgress | None = None,
    on_group: OnGroup | None = None,
) -> SimulationRecord:
    """Simulate one RL step from the end of the rollout, under every method of the configuration, on the same tokens.

    Planning is really done, here and now; everything else is computed from the cost model.

    Args:
        config: of the simulation.
        balancers: of yours, by short name, after the methods of the configuration.
        on_progress: told of every method that is simulated.
        on_group: told of every group under every method.

    Raises:
        ConfigError, TopologyError, CountsError: when the configuration describes what cannot be.
    """
    cluster = config.described()
    topology, costs = cluster.topology, cluster.costs
    if config.cluster.pipeline > costs.model.num_layers:
        raise ConfigError(
            f"pipeline is {config.cluster.pipeline}, the model has {costs.model.num_layers} routed layers; "
            "expected one layer for each stage at least"
        )
    steps = list(group_steps(config, topology, costs.model))
    known = _methods(config, dict(balancers or {}), has_previous=steps[0].problem.previous_LE is not None)
    sums = {name: _Sums() for name in ("forced_balance", "bound", *known)}
    done, total = 0, len(steps) * len(known)
    for step in steps:
        forced = EPGroup.of(forced_balance(step.problem), step, config, topology, costs)
        sums["forced_balance"].add(forced.run())
        sums["bound"].add(forced.bound(step, topology, costs).run())
        for name, method in known.items():
            if on_progress is not None:
                on_progress(method.label, done, total)
            served = serve(method, step.problem, costs)
            group = EPGroup.of(served, step, config, topology, costs)
            sums[name].serve(group, served, step, config, topology, costs)
            if on_group is not None:
                on_group(name, group)
            done += 1
    if on_progress is not None:
        on_progress("done", total, total)
    return _record(config, known, sums, steps, topology, costs)


def sweep(config: SimulateConfig, *, on_progress: OnProgress | None = None) -> Iterator[SweepRecord]:
    """Simulate every value of every key of `config.sweep`, one at a time; all else as configured.

    Raises:
        ConfigError, TopologyError, CountsError: when a value makes a configuration of what cannot be.
    """
    for key, value in config.sweep.points():
        yield SweepRecord(key, value, simulate(varied(config, key, value), on_progress=on_progress))


def _methods(
    config: SimulateConfig, balancers: dict[str, Balancer], *, has_previous: bool
) -> dict[str, Balancer | PlannerPreset]:
    """What is simulated. Methods that plan from the step before are left out where all are asked for by default."""
    if taken := sorted({"forced_balance", "bound", *METHODS} & set(balancers)):
        raise ConfigError(f"balancers are called {', '.join(taken)}, which are names of our own; expected others")
    methods = {name: METHODS[name] for name in config.methods} | balancers
    if has_previous:
        return methods
    known = {name: how for name, how in methods.items() if how.knows != "previous step"}
    is_default = config.methods == tuple(METHODS)
    if asked := [name for name in methods if name not in known and (name in balancers or not is_default)]:
        raise ConfigError(
            f"{', '.join(asked)} goes by the loads of the step before, and workload.counts came without them; give "
            "workload.previous_counts, or other methods"
        )
    return known


@dataclass(frozen=True)
class SweepRecord:
    """One point of a sweep.

    Attributes:
        key: what was changed, a field of `SweepConfig`.
        value: to what; bandwidths are factors.
        simulation: the record.
    """

    key: str
    value: float
    simulation: SimulationRecord

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"simulation": self.simulation.as_dict()}


@dataclass
class _Sums:
    """One method over the groups.

    Attributes:
        runs: recompute and update of every group.
        planning_s, home_moves_s: of every group.
        ratios: imbalance of every cell.
        fetches: experts fetched.
        moved_bytes: of every group.
    """

    runs: list[tuple[StageRun, StageRun]] = field(default_factory=list)
    planning_s: list[float] = field(default_factory=list)
    home_moves_s: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    fetches: int = 0
    moved_bytes: list[dict[str, dict[str, float]]] = field(default_factory=list)

    def add(self, runs: tuple[StageRun, StageRun]) -> None:
        """Add the recompute and the update of one group."""
        self.runs.append(runs)

    def serve(
        self,
        group: EPGroup,
        served: ServedStep,
        step: GroupStep,
        config: SimulateConfig,
        topology: Topology,
        costs: CostModel,
    ) -> None:
        """Add what one group does, and what its plan is like."""
        execution, (num_micro_steps, drawn) = config.execution, step.problem.counts_MLGE.shape[:2]
        # Layers that were drawn stand for all, and planning takes as long for one as for another.
        scale = costs.model.num_layers / drawn
        planning_s = served.planning_s * scale if execution.planning_s is None else execution.planning_s
        self.add(group.run(plan_ready(num_micro_steps, planning_s, execution.plan_lead_s, early=execution.early_cells)))
        self.moved_bytes.append(group.moved_bytes(topology, costs))
        self.planning_s.append(planning_s)
        self.home_moves_s.append(move_seconds(served.before_LE, served.home_LE, scale, topology, costs))
        for cell, (_, counts_GE) in zip(served.cells, step.problem.cells(), strict=True):
            total = int(counts_GE.sum())
            self.ratios.append(int(cell.loads_G(counts_GE).max()) / total * topology.num_ranks if total else 1.0)
            self.fetches += int((cell.fetched_R & (cell.home_E[cell.expert_R] != cell.rank_R)).sum())

    @property
    def training_s(self) -> float:
        """The slowest group's recompute, then the slowest group's update: all wait for all between the two."""
        return sum(max(_seconds(run) for run in stage) for stage in zip(*self.runs, strict=True))


def _record(
    config: SimulateConfig,
    methods: Mapping[str, Balancer | PlannerPreset],
    sums: dict[str, _Sums],
    steps: list[GroupStep],
    topology: Topology,
    costs: CostModel,
) -> SimulationRecord:
    forced_balance_s, bound_s = sums["forced_balance"].training_s, sums["bound"].training_s
    around = tuple(f(config.cluster, topology, costs) for f in (publish_seconds, reduction_seconds, optimizer_seconds))
    reduced = {"gradients and weights of data parallelism": reduction_bytes(config.cluster, topology, costs)}
    records: list[MethodRecord] = []
    for name, method in methods.items():
        static = records[0] if records else None
        moved = _means(sums[name].moved_bytes) | reduced
        records.append(_method(name, method, sums[name], config, forced_balance_s, bound_s, around, moved, static))
    counts = np.concatenate([step.problem.counts_MLGE[:, 0] for step in steps])
    return SimulationRecord(
        facts=_facts(config, costs),
        gpus=config.cluster.gpus,
        expert_parallel=config.cluster.expert_parallel,
        groups=config.cluster.groups,
        groups_simulated=len(steps),
        tokens_per_rank=float(counts.sum(axis=2).mean() / costs.model.top_k),
        cells_per_group=len(steps[0].problem.counts_MLGE) * costs.model.num_layers,
        forced_balance_s=forced_balance_s,
        bound_s=bound_s,
        rollout_s=config.execution.rollout_s,
        methods=tuple(records),
    )


def _method(
    name: str,
    method: Balancer | PlannerPreset,
    sums: _Sums,
    config: SimulateConfig,
    forced_balance_s: float,
    bound_s: float,
    around: tuple[float, ...],
    moved_bytes: dict[str, dict[str, float]],
    static: MethodRecord | None,
) -> MethodRecord:
    stages = list(zip(*sums.runs, strict=True))
    # of each stage the run that all other groups wait for
    slowest = [max(stage, key=lambda run: float(run.end_P.max())) for stage in stages]
    seconds = [max(_seconds(run) for run in stage) for stage in stages]
    training_s = sum(seconds)
    waiting = 1 - sum(float(np.mean([_seconds(run) for run in stage])) for stage in stages) / training_s
    exposed_s = max(float(run.end_P.max()) for run in stages[0]) - seconds[0]
    publish_s, *after = around
    publishing_s = publish_s if sums.fetches else 0.0
    split = StageSeconds(exposed_s, max(sums.home_moves_s), publishing_s, *seconds, *after)
    hours = (sum(split) + config.execution.rollout_s) * config.cluster.gpus / 3600
    return MethodRecord(
        name=name,
        label=method.label,
        not_executed=not_executed(method, config),
        stages=split,
        recompute_parts=_parts(slowest[0]),
        update_parts=_parts(slowest[1]),
        imbalance=float(np.mean(sums.ratios)),
        share_of_forced_balance=forced_balance_s / training_s,
        share_of_bound=bound_s / training_s,
        speedup_over_static=1.0 if static is None else static.training_s / training_s,
        groups_waiting=waiting,
        planning_s=max(sums.planning_s),
        fetches_per_cell=sums.fetches / len(sums.ratios),
        moved_bytes=moved_bytes,
        gpu_hours=hours,
        gpu_hours_saved=0.0 if static is None else static.gpu_hours - hours,
    )


def _means(groups: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        what: {link: float(np.mean([group[what][link] for group in groups])) for link in by_link}
        for what, by_link in groups[0].items()
    }


def _seconds(run: StageRun) -> float:
    """To the last event, waiting for the plan aside."""
    p = int(run.end_P.argmax())
    return float(run.end_P[p] - run.parts_PX[0, PARTS.index("waiting for the plan")])


def _parts(run: StageRun) -> dict[str, float]:
    parts_X: Floats = run.parts_PX[int(run.end_P.argmax())]
    return dict(zip(PARTS, parts_X.tolist(), strict=True))


PATH_WORDS = {
    "host": "from host memory within a node, from peers beyond",
    "direct": "from peers",
}


def _facts(config: SimulateConfig, costs: CostModel) -> dict[str, str]:
    cluster, execution = config.cluster, config.execution
    model, hardware = (
        config.model.get("preset", "sizes of its own"),
        config.hardware.get("preset", "GPUs of rates of their own"),
    )
    return {
        "cluster": f"{cluster.gpus} x {hardware}, expert parallel {cluster.expert_parallel}, pipeline stages "
        f"{cluster.pipeline}, {cluster.groups} groups",
        "model": f"{model}: {costs.model.num_layers} routed layers, top-{costs.model.top_k} of "
        f"{costs.model.num_experts} experts of {costs.model.expert_bytes / 1e6:.1f} MB",
        "dispatcher": costs.dispatcher,
        "replicas": f"{PATH_WORDS[costs.paths]}, {costs.prefetch} cell{'s' * (costs.prefetch != 1)} ahead",
        "overlap": f"{execution.overlap:g} of the computing time hides all-to-alls",
    }
