"""What a simulation yields: plain numbers, for JSON, tables and pages."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

STAGES = ("planning", "home moves", "publishing", "recompute", "update", "reduction", "optimizer")
"""Stages of a step, one after the other."""


class StageSeconds(NamedTuple):
    """Seconds of `STAGES`. Of planning, what it delays the recompute by."""

    planning: float
    home_moves: float
    publishing: float
    recompute: float
    update: float
    reduction: float
    optimizer: float


@dataclass(frozen=True, kw_only=True)
class MethodRecord:
    """One method on one step of the cluster.

    Attributes:
        name: short.
        label: for tables.
        not_executed: what no executor carries out of what is simulated here, in words; empty where one does all of it.
        stages: seconds of each stage, of the slowest group.
        recompute_parts, update_parts: seconds of the slowest group by `engine.PARTS`; they add up to those stages,
            waiting for the plan aside.
        imbalance: over cells, the slowest rank's load over the mean load, on average.
        share_of_forced_balance: recompute and update under forced balance, over those of this method. It can exceed 1.
        share_of_bound: the least that any plan can take for these, over those of this method. It cannot exceed 1.
        speedup_over_static: of recompute and update.
        groups_waiting: share of recompute and update that a group waits for the slowest one, on average.
        planning_s: processor seconds of planning a group's step, all layers, on one thread; hidden for the most part.
        fetches_per_cell: experts whose weights are moved for a cell.
        moved_bytes: what a GPU sends in a step, on average, by what it is and link: host, node, cluster. Fetches from
            host memory are counted where they arrive.
        gpu_hours: of one step, rollout included.
        gpu_hours_saved: against static.
    """

    name: str
    label: str
    not_executed: tuple[str, ...]
    stages: StageSeconds
    recompute_parts: dict[str, float]
    update_parts: dict[str, float]
    imbalance: float
    share_of_forced_balance: float
    share_of_bound: float
    speedup_over_static: float
    groups_waiting: float
    planning_s: float
    fetches_per_cell: float
    moved_bytes: dict[str, dict[str, float]]
    gpu_hours: float
    gpu_hours_saved: float

    @property
    def training_s(self) -> float:
        """Recompute and update, waiting for the plan aside: what methods are compared by."""
        return self.stages.recompute + self.stages.update

    @property
    def step_s(self) -> float:
        """All stages; the rollout aside."""
        return sum(self.stages)

    @property
    def exposed_share(self) -> float:
        """Share of recompute and update that waits for weights and gradients that move."""
        exposed = self.recompute_parts["exposed transfers"] + self.update_parts["exposed transfers"]
        return exposed / self.training_s

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        derived = {name: getattr(self, name) for name in ("training_s", "step_s", "exposed_share")}
        return asdict(self) | {"stages": self.stages._asdict()} | derived


@dataclass(frozen=True, kw_only=True)
class SimulationRecord:
    """All methods on the same step.

    Attributes:
        facts: what was simulated, for people, by name.
        gpus: in all.
        expert_parallel: EP.
        groups: expert-parallel groups in all.
        groups_simulated: of these, the ones that were drawn and simulated.
        tokens_per_rank: of a GPU in a micro-step, on average.
        cells_per_group: M * L.
        forced_balance_s: recompute and update under forced balance: every source sends the same to every expert,
            homes serve, nothing moves. Attention is as it is. Not a lower bound: it has more traffic than plans need.
        bound_s: no plan takes less for these; see `costs.pricing.least_seconds`. Like forced balance, never executed.
        rollout_s: as configured.
        methods: in the order of the configuration.
    """

    facts: dict[str, str]
    gpus: int
    expert_parallel: int
    groups: int
    groups_simulated: int
    tokens_per_rank: float
    cells_per_group: int
    forced_balance_s: float
    bound_s: float
    rollout_s: float
    methods: tuple[MethodRecord, ...]

    def __getitem__(self, name: str) -> MethodRecord:
        """The record of a method.

        Raises:
            KeyError: when it was not simulated.
        """
        for record in self.methods:
            if record.name == name:
                return record
        raise KeyError(name)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"methods": [record.as_dict() for record in self.methods]}


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
