"""Every way to serve a step, by name: balancers, and presets of our planner; how one is run and timed, and which are
executed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel
from foreroute.plan.capabilities import Ability, lacking
from foreroute.plan.hosts import CellPlan
from foreroute.plan.options import PlanOptions, SlotSharing
from foreroute.plan.step_plan import StepPlan
from foreroute.planner.plan_step import plan
from foreroute.simulate.balancers import Balancer, BalancerInput, static
from foreroute.simulate.eplb import eplb_micro_step, eplb_previous, eplb_step

if TYPE_CHECKING:
    from foreroute.simulate.config import SimulateConfig

REPEATED_S = 0.1
"""Seconds of planning from which one timing is enough: what disturbs a machine is short."""


@dataclass(frozen=True)
class PlannerPreset:
    """A way to call our planner.

    Attributes:
        label: for tables.
        options: of the planner.
        redundant_slots: instead of the topology's.
        knows: as of a `Balancer`, as are `slots` and `method`.
    """

    label: str
    options: PlanOptions
    redundant_slots: int | None = None
    knows: str = "micro-step"

    @property
    def slots(self) -> SlotSharing:
        """Those of the options."""
        return self.options.slots

    def method(self, problem: BalancerInput) -> Iterator[CellPlan]:
        """Plan the whole step before its first cell."""
        topology = problem.topology
        if self.redundant_slots is not None:
            topology = replace(topology, redundant_slots=self.redundant_slots)
        found = plan(problem.counts_MLGE, topology, self.options, home_LE=problem.home_LE, costs=problem.costs)
        return (found.cell(*cell) for cell in np.ndindex(*found.shape[:2]))


BALANCERS = {
    "static": Balancer("static", "nothing", static),
    "eplb_previous": Balancer("EPLB, previous step", "previous step", eplb_previous),
    "eplb_step": Balancer("EPLB, this step", "step", eplb_step),
    "eplb_micro_step": Balancer("EPLB, per micro-step", "micro-step", eplb_micro_step),
}
"""By short name, in the order of tables. `benchmarks/balancers` has more in the same form."""

PRESETS = {
    "ours": PlannerPreset("foreroute", PlanOptions(tolerance=0.02)),
    "ours_exact": PlannerPreset("foreroute, exact", PlanOptions(tolerance=0.0)),
    "ours_rehomed": PlannerPreset("foreroute, 16 home moves a layer", PlanOptions(tolerance=0.02, home_moves=16)),
    "ours_traffic": PlannerPreset("foreroute, 8 slots against traffic", PlanOptions(tolerance=0.02, traffic=True), 8),
}
"""By short name. Options not named are defaults."""

METHODS: dict[str, Balancer | PlannerPreset] = {**BALANCERS, **PRESETS}
"""By short name, in the order of tables."""


@dataclass(frozen=True, eq=False)
class ServedStep:
    """A step as one method serves it.

    Attributes:
        counts_MLGE: integers [M, L, G, E].
        before_LE: int16 [L, E], the homes when the step begins.
        slots: each layer has redundant slots of its own, or all layers share one set.
        cells: of the step, in the order of execution.
        planning_s: processor seconds of planning; so other work on this machine does not count.
    """

    counts_MLGE: NDArray[np.integer]
    before_LE: NDArray[np.int16]
    slots: SlotSharing
    cells: list[CellPlan]
    planning_s: float = 0.0

    @classmethod
    def of(cls, plan: StepPlan, counts_MLGE: NDArray[np.integer], planning_s: float = 0.0) -> ServedStep:
        """As a plan of these counts serves it."""
        cells = [plan.cell(*cell) for cell in np.ndindex(*plan.shape[:2])]
        return cls(counts_MLGE, plan.previous_home_LE, plan.slots, cells, planning_s)

    @property
    def home_LE(self) -> NDArray[np.int64]:
        """int64 [L, E], the homes during the step."""
        return np.stack([cell.home_E for cell in self.cells[: len(self.before_LE)]]).astype(np.int64)


def serve(
    method: Balancer | PlannerPreset, problem: BalancerInput, costs: CostModel, *, most_timings: int = 1
) -> ServedStep:
    """Serve a step by one method. Compiling is done first, and is no part of planning.

    Args:
        method: one of `METHODS`, or a balancer of yours.
        problem: the step; its costs are these, whatever it says.
        costs: the cost model.
        most_timings: how often planning is done where it takes less than `REPEATED_S`; the shortest counts.

    Raises:
        CountsError: when a balancer plans from the step before, and the problem knows nothing of it.
    """
    problem = replace(problem, costs=costs)
    counts_MLGE, home_LE = problem.counts_MLGE, problem.home_LE
    previous = None if problem.previous_LE is None else problem.previous_LE[:1]
    next(method.method(replace(problem, counts_MLGE=counts_MLGE[:1, :1], home_LE=home_LE[:1], previous_LE=previous)))
    cells: list[CellPlan] = []
    seconds: list[float] = []
    while len(seconds) < most_timings and sum(seconds) < REPEATED_S:
        before_s = time.process_time()
        cells = list(method.method(problem))
        seconds.append(time.process_time() - before_s)
    return ServedStep(counts_MLGE, home_LE, method.slots, cells, min(seconds))


def all_at_home(problem: BalancerInput) -> ServedStep:
    """Every expert at its home."""
    return ServedStep(problem.counts_MLGE, problem.home_LE, "layer", list(static(problem)))


def forced_balance(problem: BalancerInput) -> ServedStep:
    """Let every source send the same to every expert, give or take one; homes serve, nothing moves."""
    num_experts = problem.num_experts
    share_MLG, left_MLG = np.divmod(problem.counts_MLGE.sum(axis=-1, dtype=np.int64), num_experts)
    # what is left over goes round, so that the experts are level too
    begin_MLG = np.cumsum(left_MLG, axis=-1) - left_MLG
    extra_MLGE = (np.arange(num_experts) - begin_MLG[..., None]) % num_experts < left_MLG[..., None]
    return all_at_home(replace(problem, counts_MLGE=share_MLG[..., None] + extra_MLGE))


def not_executed(method: Balancer | PlannerPreset, config: SimulateConfig) -> tuple[str, ...]:
    """What no executor carries out of a step that this method serves, in words; empty where one does all of it."""
    cluster, execution, described = config.cluster, config.execution, config.described()
    asked = {
        Ability.NODES: described.topology.num_nodes > 1,
        Ability.EXPERT_DATA_PARALLEL: cluster.groups > 1,
        Ability.OVERLAP: execution.overlap > 0,
        Ability.DEDUPLICATED_DISPATCH: described.costs.dispatcher == "dedup",
    }
    if not isinstance(method, PlannerPreset) and method is not METHODS["static"]:
        asked[Ability.OTHER_BALANCERS] = True
    return lacking({ability for ability, is_asked in asked.items() if is_asked})
