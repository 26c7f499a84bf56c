"""Records of methods on a step, as plain numbers: for JSON, tables, sentences and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from foreroute.simulate.methods import PRESETS, Loads

PLAN = "waiting for the plan"
"""The part of a pass that planning delays it by: counted as planning, and not as time of the pass."""
AS_PLANNED = "foreroute_as_planned"
"""The short name of a plan as if both passes ran by it, where one runs at homes."""


class PhaseSeconds(NamedTuple):
    """Seconds of the phases of a step, one after the other; of planning, what it delays the recompute by."""

    planning: float
    home_moves: float
    publishing: float
    recompute: float
    update: float
    reduction: float
    optimizer: float


@dataclass(frozen=True, kw_only=True)
class MethodRecord:
    """One method on one step. Cells without assignments count in sums and as balanced.

    Attributes:
        name: short.
        label: for tables.
        recompute_parts, update_parts: seconds of both passes by part, as they are executed.
        imbalance, imbalance_99, imbalance_worst: the slowest rank's load over the mean load: the mean of all cells,
            what 99 % of those of a pass do not exceed, and the worst. Both passes count.
        fetches_per_cell: experts whose weights are moved for a cell.
        cross_node_share: share of the assignments that are served on another node than their token's.
        home_moves: experts that get another home before the step.
        planning_s: processor seconds of planning, from counts to token splits, on one thread.
    """

    name: str
    label: str
    recompute_parts: Mapping[str, float]
    update_parts: Mapping[str, float]
    imbalance: float
    imbalance_99: float
    imbalance_worst: float
    fetches_per_cell: float
    cross_node_share: float
    home_moves: int
    planning_s: float

    @property
    def is_plan(self) -> bool:
        """Say whether it is a plan of foreroute."""
        return self.name in PRESETS or self.name == AS_PLANNED

    @property
    def pass_s(self) -> tuple[float, float]:
        """Seconds of recompute and update, waiting for the plan aside."""
        recompute_s, update_s = (
            sum(seconds for part, seconds in parts.items() if part != PLAN)
            for parts in (self.recompute_parts, self.update_parts)
        )
        return recompute_s, update_s

    @property
    def training_s(self) -> float:
        """Seconds of both passes: what methods are compared by."""
        return sum(self.pass_s)

    @property
    def exposed_share(self) -> float:
        """Share of both passes that waits for weights and gradients that move."""
        exposed = self.recompute_parts["exposed transfers"] + self.update_parts["exposed transfers"]
        return exposed / self.training_s


@dataclass(frozen=True, kw_only=True)
class PricedMethod(MethodRecord):
    """One method on one step of one group, priced cell by cell.

    Attributes:
        moves_s: seconds of the experts that move before the step, with optimizer state.
        home_bytes: of these, for a rank on average.
        fetched_bytes: weights of replicas that a rank gets in a pass, on average.
    """

    moves_s: float
    home_bytes: float
    fetched_bytes: float

    @property
    def step_s(self) -> float:
        """Both passes, and the homes that move before them."""
        return self.training_s + self.moves_s


def load_figures(loads: Sequence[Loads]) -> dict[str, float]:
    """The fields of a `MethodRecord` that loads of one or several groups say."""
    ratios_SC = np.concatenate([each.over_mean_SMLG.max(axis=-1).reshape(2, -1) for each in loads], axis=1)
    fetches = np.concatenate([each.fetches_SML.ravel() for each in loads])
    # groups may differ in tokens, so shares are of sums
    crossing, served = (sum(int(each[n].sum()) for each in loads) for n in (1, 0))
    return {
        "imbalance": float(ratios_SC.mean()),
        "imbalance_99": float(np.quantile(ratios_SC, 0.99, axis=1).max()),
        "imbalance_worst": float(ratios_SC.max()),
        "fetches_per_cell": float(fetches.mean()),
        "cross_node_share": crossing / max(served, 1),
    }


@dataclass(frozen=True, kw_only=True)
class SimulatedMethod(MethodRecord):
    """One method on one step of a whole cluster. Parts are those of `engine.PARTS`, of the slowest group.

    Attributes:
        not_executed: what no executor carries out of what is simulated here, in words; empty where one does all of it.
        phases: seconds of each phase, of the slowest group.
        share_of_forced_balance: recompute and update under forced balance, over those of this method. It can exceed 1.
        share_of_bound: the least that any plan can take for these, over those of this method. It cannot exceed 1.
        speedup_over_static: of recompute and update.
        moved_bytes: what a GPU sends in a step, on average, by what it is and link: host, node, cluster. Fetches from
            host memory are counted where they arrive.
        gpu_hours: of one step, rollout included.
        gpu_hours_saved: against static.
    """

    not_executed: tuple[str, ...]
    phases: PhaseSeconds
    share_of_forced_balance: float
    share_of_bound: float
    speedup_over_static: float
    moved_bytes: dict[str, dict[str, float]]
    gpu_hours: float
    gpu_hours_saved: float

    @property
    def step_s(self) -> float:
        """All phases; the rollout aside."""
        return sum(self.phases)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        derived = {name: getattr(self, name) for name in ("training_s", "step_s", "exposed_share")}
        return asdict(self) | {"phases": self.phases._asdict()} | derived


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
    methods: tuple[SimulatedMethod, ...]

    def __getitem__(self, name: str) -> SimulatedMethod:
        """The record of a method. Raises `KeyError` when it was not simulated."""
        return {record.name: record for record in self.methods}[name]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"methods": [record.as_dict() for record in self.methods]}


Record = TypeVar("Record", bound=MethodRecord)


def headline(records: Sequence[Record]) -> Record:
    """The method that a page is about: the first plan of foreroute, else the fastest other one, else static."""
    plans, others = _balanced(records)
    return plans[0] if plans else _fastest(others or records)


def strongest_other(records: Sequence[Record]) -> Record | None:
    """The fastest method that is neither static nor a plan of foreroute; None where the headline is that method."""
    plans, others = _balanced(records)
    return _fastest(others) if plans and others else None


def compared(records: Sequence[Record]) -> list[Record]:
    """The few methods that plots compare with static: the headline, the fastest plan, the fastest other one."""
    plans, others = _balanced(records)
    # the headline may be the fastest plan too, and stands once
    chosen = [*plans[:1], *(_fastest(group) for group in (plans, others) if group)]
    return [record for n, record in enumerate(chosen) if record not in chosen[:n]]


def fastest_plan(records: Sequence[Record]) -> Record:
    """The fastest plan of foreroute; the headline where there is none."""
    return _fastest(_balanced(records)[0] or [headline(records)])


def _balanced(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Plans of foreroute, and the other methods but static."""
    balanced = [record for record in records if record.name != "static"]
    return [one for one in balanced if one.is_plan], [one for one in balanced if not one.is_plan]


def _fastest(records: Sequence[Record]) -> Record:
    """The fastest in recompute and update, with homes that move where these are priced."""
    return min(records, key=lambda one: one.step_s if isinstance(one, PricedMethod) else one.training_s)
