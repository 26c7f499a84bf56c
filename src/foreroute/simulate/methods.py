"""What the simulator is given of each method: the assignments of a step, what moved before it, and who executes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel
from foreroute.errors import ConfigError
from foreroute.plan.capabilities import Ability, lacking
from foreroute.plan.options import SlotUse
from foreroute.plan.step_plan import CellHosts
from foreroute.planner.balancers import BALANCERS, Balancer, BalancerInput
from foreroute.planner.methods import METHODS, Ours, run_method

if TYPE_CHECKING:
    from foreroute.simulate.config import SimulateConfig


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


def check_methods(methods: Sequence[str]) -> None:
    """Refuse names that nothing has.

    Raises:
        ConfigError: naming them.
    """
    if unknown := [name for name in methods if name not in METHODS]:
        raise ConfigError(f"there is no method called {', '.join(unknown)}; expected some of {', '.join(METHODS)}")


def plan_with(method: Balancer | Ours, problem: BalancerInput, costs: CostModel) -> PlannedStep:
    """Plan a step by one method; arguments and errors are those of `planner.methods.run_method`."""
    run = run_method(method, problem, costs)
    assignments = list(run.cells)
    return PlannedStep(assignments, run.home_LE, run.home_moves, run.slots, run.planning_s)


def not_executed(method: Balancer | Ours, config: SimulateConfig) -> tuple[str, ...]:
    """What no executor carries out of a step that this method serves, in words; empty where one does all of it."""
    cluster, execution, described = config.cluster, config.execution, config.described()
    dedup = described.costs.dispatcher == "dedup"
    needs = {Ability.KNOWN_COUNTS, Ability.DEDUPLICATED_DISPATCH if dedup else Ability.COPIED_DISPATCH}
    asked = {
        Ability.NODES: described.topology.num_nodes > 1,
        Ability.EXPERT_DATA_PARALLEL: cluster.groups > 1,
        Ability.PIPELINE: cluster.pipeline > 1,
        Ability.OVERLAP: execution.overlap > 0,
    }
    if isinstance(method, Ours):
        asked |= {
            Ability.REPLICAS: True,
            Ability.LAYER_SLOTS: method.options.slots == "layer",
            Ability.SHARED_SLOTS: method.options.slots == "shared",
            Ability.HOME_MOVES: method.options.home_moves != 0,
            Ability.HOST_PATH: described.costs.paths == "host",
            Ability.DIRECT_PATH: described.costs.paths == "direct" or described.topology.num_nodes > 1,
            Ability.PREFETCH: execution.prefetch > 0,
            Ability.EARLY_CELLS: execution.early_cells,
        }
    elif method is not METHODS["static"]:
        asked[Ability.OTHER_BALANCERS] = True
    return lacking(needs | {ability for ability, is_asked in asked.items() if is_asked})


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
