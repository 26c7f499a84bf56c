"""Every way to serve a step, by name: balancers, and presets of our planner; how one is run and timed, and which are
executed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.links import served_loads
from foreroute.costs.model import CostModel
from foreroute.plan.capabilities import Ability, lacking
from foreroute.plan.hosts import CellPlan, Hosts
from foreroute.plan.options import PASS_NAMES, PlanOptions, SlotSharing
from foreroute.plan.step_plan import StepPlan
from foreroute.plan.topology import Topology
from foreroute.planner.homes import place_homes
from foreroute.planner.plan_step import plan_and_why
from foreroute.simulate.balancers import Balancer, BalancerInput, static
from foreroute.simulate.eplb import eplb_micro_step, eplb_previous, eplb_step

if TYPE_CHECKING:
    from foreroute.simulate.config import SimulateConfig

REPEATED_S = 0.1
"""Seconds of planning from which one timing is enough: what disturbs a machine is short."""


@dataclass(frozen=True)
class Planner:
    """The planner as the method of a balancer, with redundant slots in place of the topology's where it says some."""

    options: PlanOptions
    redundant_slots: int | None = None

    def __call__(self, problem: BalancerInput) -> StepPlan:
        """Plan the whole step before its first cell."""
        topology = problem.topology
        if self.redundant_slots is not None:
            topology = replace(topology, redundant_slots=self.redundant_slots)
        found, _ = plan_and_why(
            problem.counts_MLGE,
            topology,
            self.options,
            home_LE=problem.home_LE,
            costs=problem.costs,
            squares_MG=problem.squares_MG,
        )
        return found


@dataclass(frozen=True)
class HomesAlone:
    """No replica: experts move once, before the step, and sequences are packed for their homes.

    With `old` experts are where the step before would have had them, and nothing moves.
    """

    old: bool = False

    def prepared(self, problem: BalancerInput) -> BalancerInput:
        """Give what is there before planning begins: sequences, counted once, and old homes."""
        sequences, previous, topology = problem.sequences, problem.previous_sequences, problem.topology
        if sequences is not None:
            counted = sequences()
            problem = replace(problem, sequences=lambda: counted)
        if not self.old:
            return problem
        if previous is not None:
            return replace(problem, home_LE=previous().with_homes(topology, problem.home_LE)[1])
        loads_LE = problem.previous_loads_LE()
        counts_MLGE = np.zeros((1, len(loads_LE), topology.num_ranks, problem.num_experts), np.int64)
        # shares are all that matters, and a cell holds fewer assignments than a step may
        counts_MLGE[0, :, 0] = loads_LE >> max(0, int(loads_LE.sum(axis=1).max()).bit_length() - 31)
        return replace(problem, home_LE=place_homes(counts_MLGE, topology, problem.home_LE))

    def __call__(self, problem: BalancerInput) -> tuple[BalancerInput, StepPlan]:
        """Give the step as it is packed, and its plan. Without sequences it stays as it is packed."""
        topology, home_LE, packed = problem.topology, problem.home_LE, None
        if problem.sequences is None:
            home_LE = home_LE if self.old else place_homes(problem.counts_MLGE, topology, home_LE)
        elif self.old:
            packed = problem.sequences().packed_for(home_LE)
        else:
            packed, home_LE = problem.sequences().with_homes(topology, home_LE)
        if packed is not None:
            problem = problem.packed_as(packed)
        found, _ = plan_and_why(problem.counts_MLGE, topology, PlanOptions(replicas=False), home_LE=home_LE)
        return problem, replace(found, previous_home_LE=problem.home_LE.astype(np.int16))


BALANCERS = {
    "static": Balancer("static", "nothing", static),
    "eplb_previous": Balancer("EPLB, previous step", "previous step", eplb_previous),
    "eplb_step": Balancer("EPLB, this step", "step", eplb_step),
    "eplb_micro_step": Balancer("EPLB, per micro-step", "micro-step", eplb_micro_step),
}
"""By short name, in the order of tables. `benchmarks/balancers` has more in the same form."""


def _preset(label: str, redundant_slots: int | None = None, **options: bool | float | int) -> Balancer:
    """The planner with these options; others are defaults."""
    return Balancer(label, "micro-step", Planner(PlanOptions(**options), redundant_slots))  # type: ignore[arg-type]


PRESETS = {
    "foreroute": _preset("foreroute", tolerance=0.02),
    "foreroute_exact": _preset("foreroute, exact", tolerance=0.0),
    "foreroute_rehomed": _preset("foreroute, 16 home moves a layer", tolerance=0.02, home_moves=16),
    "foreroute_traffic": _preset("foreroute, 8 slots against traffic", 8, tolerance=0.02, traffic=True),
    "foreroute_homes": Balancer("foreroute, homes alone", "micro-step", HomesAlone()),
    "foreroute_homes_previous": Balancer("foreroute, old homes alone", "previous step", HomesAlone(old=True)),
}
"""By short name."""

METHODS = {**BALANCERS, **PRESETS}
"""By short name, in the order of tables."""
DEFAULT_METHODS = tuple(name for name, method in METHODS.items() if not isinstance(method.method, HomesAlone))
"""All but those that search for a packing, which takes longer than all others."""


class Loads(NamedTuple):
    """Loads of a served step in every cell of both passes."""

    served_SMLG: NDArray[np.int64]  # [2, M, L, G], assignments that each rank serves
    # [2, M, L], of these, the ones that are served on another node than their token's
    crossing_SML: NDArray[np.int64]
    fetches_SML: NDArray[np.int64]  # [2, M, L], experts whose weights are moved for the cell

    @property
    def over_mean_SMLG(self) -> NDArray[np.float64]:
        """float64 [2, M, L, G], load of every rank over the mean of its cell; 1 where a cell is empty."""
        return over(self.served_SMLG, self.served_SMLG.mean(axis=-1, keepdims=True))


@dataclass(frozen=True, eq=False)
class ServedStep:
    """A step as one method serves it."""

    counts_MLGE: NDArray[np.integer]  # integers [M, L, G, E]
    before_LE: NDArray[np.int16]  # [L, E], the homes when the step begins
    slots: SlotSharing  # each layer has redundant slots of its own, or all layers share one set
    # who serves what in the recompute, and in the update. They differ where a plan saves too little in one, which
    # executors then run with every expert at its home.
    passes: tuple[Hosts, Hosts]
    planning_s: float = 0.0  # processor seconds of planning; so other work on this machine does not count
    squares_MG: NDArray[np.int64] | None = None  # of sequences as they are packed here, as in `BalancerInput`

    @classmethod
    def of(cls, plan: StepPlan, step: BalancerInput, planning_s: float = 0.0) -> ServedStep:
        """As executors serve a plan of this step."""
        recompute, update = (plan.in_pass(pass_name).hosts for pass_name in PASS_NAMES)
        given = step.counts_MLGE, plan.previous_home_LE, plan.slots, (recompute, update)
        return cls(*given, planning_s, step.squares_MG)

    @property
    def home_LE(self) -> NDArray[np.int16]:
        """int16 [L, E], the homes during the step."""
        return self.passes[0].home_LE

    @property
    def home_moves(self) -> int:
        """Experts that get another home before the step."""
        return int((self.home_LE != self.before_LE).sum())

    def loads(self, topology: Topology) -> Loads:
        """Count what every rank serves."""
        of_passes = [served_loads(hosts, self.counts_MLGE, topology.ranks_per_node) for hosts in self.passes]
        return Loads(*(np.stack(of_pass) for of_pass in zip(*of_passes, strict=True)))


def over(values: NDArray[np.number], mean: NDArray[np.number]) -> NDArray[np.float64]:
    """Values over a mean; 1 where it is 0, as in a cell without assignments."""
    ratio: NDArray[np.float64] = np.ones(np.broadcast_shapes(values.shape, mean.shape))
    np.divide(values, mean, out=ratio, where=mean > 0)
    return ratio


def serve(method: Balancer, problem: BalancerInput, costs: CostModel, *, most_timings: int = 1) -> ServedStep:
    """Serve a step by one method, planned up to `most_timings` times where that is quick; the shortest counts.

    Raises `CountsError` when a balancer plans from the step before, and the problem knows nothing of it.
    """
    problem = replace(problem, costs=costs)
    counts_MLGE, home_LE = problem.counts_MLGE, problem.home_LE
    previous = None if problem.previous_LE is None else problem.previous_LE[:1]
    # what a balancer of others compiles on its first call is no part of planning; one cell compiles all of it
    small = replace(problem, counts_MLGE=counts_MLGE[:1, :1], home_LE=home_LE[:1], previous_LE=previous)
    _planned(method, replace(small, squares_MG=None, sequences=None, previous_sequences=None))
    if isinstance(method.method, HomesAlone):
        problem = method.method.prepared(problem)
    seconds: list[float] = []
    while len(seconds) < most_timings and sum(seconds) < REPEATED_S:
        before_s = time.process_time()
        found = _planned(method, problem)
        seconds.append(time.process_time() - before_s)
    if isinstance(found, StepPlan):
        return ServedStep.of(found, problem, min(seconds))
    if isinstance(found, tuple):
        packed, made = found
        return ServedStep.of(made, packed, min(seconds))
    # homes are those of the first micro-step, the same in all
    homes = np.stack([cell.home_E for cell in found[: len(home_LE)]])
    hosts = Hosts.of_cells(homes, found)
    before_LE, passes = home_LE.astype(np.int16), (hosts, hosts)
    return ServedStep(counts_MLGE, before_LE, method.slots, passes, min(seconds), problem.squares_MG)


def _planned(method: Balancer, problem: BalancerInput) -> StepPlan | tuple[BalancerInput, StepPlan] | list[CellPlan]:
    """Run a method to its end."""
    found = method.method(problem)
    return found if isinstance(found, StepPlan | tuple) else list(found)


def all_at_home(problem: BalancerInput) -> ServedStep:
    """Every expert at its home."""
    home_LE = problem.home_LE.astype(np.int16)
    hosts = Hosts.with_room(home_LE, len(problem.counts_MLGE), problem.topology.num_ranks, 0)
    return ServedStep(problem.counts_MLGE, home_LE, "layer", (hosts, hosts), squares_MG=problem.squares_MG)


def forced_balance(problem: BalancerInput) -> ServedStep:
    """Let every source send the same to every expert, give or take one; homes serve, nothing moves."""
    num_experts = problem.num_experts
    share_MLG, left_MLG = np.divmod(problem.counts_MLGE.sum(axis=-1, dtype=np.int64), num_experts)
    # what is left over goes round, so that the experts are level too
    begin_MLG = np.cumsum(left_MLG, axis=-1) - left_MLG
    extra_MLGE = (np.arange(num_experts) - begin_MLG[..., None]) % num_experts < left_MLG[..., None]
    return all_at_home(replace(problem, counts_MLGE=share_MLG[..., None] + extra_MLGE))


def not_executed(method: Balancer, config: SimulateConfig) -> tuple[str, ...]:
    """Requirements of steps under this method that no executor supports yet, in words; none where one does all."""
    cluster, execution, described = config.cluster, config.execution, config.described()
    asked = {
        Ability.NODES: described.topology.num_nodes > 1,
        Ability.EXPERT_DATA_PARALLEL: cluster.groups > 1,
        Ability.OVERLAP: execution.overlap > 0,
        Ability.DEDUPLICATED_DISPATCH: described.costs.dispatcher == "dedup",
        # executors read plans, and the others yield cells alone; static needs none
        Ability.OTHER_BALANCERS: not isinstance(method.method, Planner | HomesAlone)
        and method is not METHODS["static"],
    }
    return lacking({ability for ability, is_asked in asked.items() if is_asked})
