"""Ours and the baselines by name, as the assignments of a whole step with the processor time that planning took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel
from foreroute.errors import ConfigError
from foreroute.plan.options import PlanOptions, SlotUse
from foreroute.plan.step_plan import CellHosts
from foreroute.planner.balancers import BALANCERS, BalancerInput
from foreroute.planner.compare import priced
from foreroute.planner.plan_step import plan


@dataclass(frozen=True)
class Ours:
    """A way to call our planner.

    Attributes:
        label: for tables.
        options: of the planner.
        redundant_slots: instead of the topology's.
    """

    label: str
    options: PlanOptions
    redundant_slots: int | None = None


OURS = {
    "ours": Ours("foreroute", PlanOptions(tolerance=0.02)),
    "ours_exact": Ours("foreroute, exact", PlanOptions(tolerance=0.0)),
    "ours_rehomed": Ours("foreroute, 16 home moves a layer", PlanOptions(tolerance=0.02, home_moves=16)),
    "ours_traffic": Ours(
        "foreroute, 8 slots against traffic", PlanOptions(tolerance=0.02, slots="shared", traffic=True), 8
    ),
}
"""Plans of ours, by short name. Options not named are defaults."""

METHODS = (*BALANCERS, *OURS)


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step, served by one method.

    Attributes:
        assignments: of all cells, in the order of execution.
        home_LE: int64 [L, E], the homes during the step.
        home_moves: int64 [moves, 4]: layer, expert, rank before, rank after.
        slots: whose the slots are.
        planning_s: processor time of planning, one thread; so other work on this machine does not count.
    """

    assignments: list[CellHosts]
    home_LE: NDArray[np.int64]
    home_moves: NDArray[np.int64]
    slots: SlotUse
    planning_s: float


def label_of(method: str) -> str:
    """For tables."""
    return OURS[method].label if method in OURS else BALANCERS[method].label


def check_methods(methods: Sequence[str]) -> None:
    """Refuse names that nothing has.

    Raises:
        ConfigError: naming them.
    """
    if unknown := [name for name in methods if name not in METHODS]:
        raise ConfigError(f"there is no method called {', '.join(unknown)}; expected some of {', '.join(METHODS)}")


def plan_with(method: str, problem: BalancerInput, costs: CostModel) -> PlannedStep:
    """Plan a step by one method.

    Args:
        method: of `METHODS`.
        problem: the step. Its prices are those of `costs`, whatever it says.
        costs: the cost model.

    Raises:
        ConfigError: for an unknown method.
        CountsError: when a method plans from the step before, and the problem knows nothing of it.
    """
    check_methods([method])
    return _ours(OURS[method], problem, costs) if method in OURS else _baseline(method, priced(problem, costs))


def all_at_home(problem: BalancerInput) -> PlannedStep:
    """Every expert at its home."""
    none = np.empty((0, 4), np.int64)
    return PlannedStep(list(BALANCERS["static"].method(problem)), problem.home_LE.astype(np.int64), none, "layer", 0.0)


def forced_balance(problem: BalancerInput) -> PlannedStep:
    """Let every source send the same to every expert, give or take one; homes serve, nothing moves."""
    num_experts = problem.num_experts
    expert_H, nothing_H = np.arange(num_experts, dtype=np.int32), np.zeros(num_experts, np.bool_)
    assignments = []
    for layer, counts_GE in problem.cells():
        share_G, left_G = np.divmod(counts_GE.sum(axis=1), num_experts)
        # What is left over goes round, so that the experts are level too.
        begin_G = np.cumsum(left_G) - left_G
        extra_GE = (np.arange(num_experts) - begin_G[:, None]) % num_experts < left_G[:, None]
        tokens_HG = np.ascontiguousarray((share_G[:, None] + extra_GE).T, np.int64)
        assignments.append(CellHosts(expert_H, problem.home_LE[layer].astype(np.int32), tokens_HG, nothing_H))
    none = np.empty((0, 4), np.int64)
    return PlannedStep(assignments, problem.home_LE.astype(np.int64), none, "layer", 0.0)


def _ours(how: Ours, problem: BalancerInput, costs: CostModel) -> PlannedStep:
    topology = problem.topology
    if how.redundant_slots is not None:
        topology = replace(topology, redundant_slots=how.redundant_slots)
    small = problem.counts_MLGE[:1, :1]
    plan(small, topology, how.options, home_LE=problem.home_LE[:1], costs=costs)  # compiles
    before = time.process_time()
    found = plan(problem.counts_MLGE, topology, how.options, home_LE=problem.home_LE, costs=costs)
    planning_s = time.process_time() - before
    num_micro_steps, num_layers = found.shape[:2]
    assignments = [
        CellHosts.of(found.cell(m, layer), problem.counts_MLGE[m, layer])
        for m, layer in np.ndindex(num_micro_steps, num_layers)
    ]
    return PlannedStep(assignments, found.home_LE.astype(np.int64), found.home_moves, how.options.slots, planning_s)


def _baseline(name: str, problem: BalancerInput) -> PlannedStep:
    baseline = BALANCERS[name]
    previous = None if problem.previous_LE is None else problem.previous_LE[:1]
    small = replace(problem, counts_MLGE=problem.counts_MLGE[:1, :1], home_LE=problem.home_LE[:1], previous_LE=previous)
    next(baseline.method(small))  # compiles
    before = time.process_time()
    assignments = list(baseline.method(problem))
    planning_s = time.process_time() - before
    home_LE = problem.home_LE.astype(np.int64)
    if baseline.rehomes:
        home_LE = np.stack([_first_hosts(one) for one in assignments[: len(home_LE)]])
    layer, expert = np.nonzero(home_LE != problem.home_LE)
    moves = np.stack([layer, expert, problem.home_LE[layer, expert], home_LE[layer, expert]], axis=1)
    return PlannedStep(assignments, home_LE, moves.astype(np.int64), baseline.slots, planning_s)


def _first_hosts(assignment: CellHosts) -> NDArray[np.int64]:
    """int64 [E], the first host of each expert."""
    _, first_E = np.unique(assignment.expert_H, return_index=True)
    ranks_E: NDArray[np.int64] = assignment.rank_H[first_E].astype(np.int64)
    return ranks_E
