"""A plan beside other balancers on the same counts: one record each, by the cost model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel
from foreroute.costs.pricing import PART_NAMES, least_seconds, step_parts
from foreroute.errors import CountsError
from foreroute.plan.counts import check_counts
from foreroute.plan.options import PASS_NAMES, PassName, PlanOptions
from foreroute.plan.step_plan import StepPlan
from foreroute.plan.topology import Topology
from foreroute.planner.plan_step import OnProgress, plan_and_why
from foreroute.simulate.balancers import Balancer, BalancerInput
from foreroute.simulate.methods import BALANCERS, Loads, ServedStep, all_at_home, over, serve
from foreroute.simulate.optimizer_step import STATE_BYTES, move_seconds
from foreroute.simulate.records import AS_PLANNED, PricedMethod, load_figures

Floats = NDArray[np.float64]


def compare(
    problem: BalancerInput, costs: CostModel, balancers: Mapping[str, Balancer] = BALANCERS
) -> Iterator[PricedMethod]:
    """Yield the record of each balancer. Those that plan from the step before are skipped when it is not known.

    Raises `CountsError` or `TopologyError` when counts, homes and ranks do not fit each other.
    """
    problem = _checked(problem)
    for name, balancer in balancers.items():
        if balancer.knows != "previous step" or problem.previous_LE is not None:
            served = serve(balancer, problem, costs)
            yield record_of(served, problem.topology, costs, name=name, label=balancer.label)


def figures_of(
    plan: StepPlan, problem: BalancerInput, costs: CostModel, *, label: str, planning_s: float
) -> PricedMethod:
    """Give the record of a made plan of a step, as executors serve it: at homes where it gains too little.

    Raises `CountsError` when the counts are of another shape than the plan's; `verify` says whether it is of them.
    """
    num_micro_steps, num_layers, num_experts = plan.shape
    expected = (num_micro_steps, num_layers, plan.topology.num_ranks, num_experts)
    if problem.counts_MLGE.shape != expected:
        raise CountsError(f"counts are {list(problem.counts_MLGE.shape)}; the plan is for {list(expected)}")
    served = ServedStep.of(plan, problem, planning_s)
    return record_of(served, plan.topology, costs, name=label, label=label)


def record_of(served: ServedStep, topology: Topology, costs: CostModel, *, name: str, label: str) -> PricedMethod:
    """Price a served step by the cost model, one cell after another."""
    model, loads, ranks = costs.model, served.loads(topology), topology.num_ranks
    counts, squares_MG = served.counts_MLGE, served.squares_MG
    # most methods serve both passes alike, and are priced once
    by_hosts = {
        id(hosts): step_parts(hosts, counts, topology, costs, served.slots, squares_MG) for hosts in served.passes
    }
    recompute, update = (
        dict(zip(PART_NAMES, by_hosts[id(hosts)][s].tolist(), strict=True)) for s, hosts in enumerate(served.passes)
    )
    return PricedMethod(
        name=name,
        label=label,
        recompute_parts=recompute,
        update_parts=update,
        **load_figures([loads]),
        home_moves=served.home_moves,
        planning_s=served.planning_s,
        # layers are those of the step, whatever the model has
        moves_s=move_seconds(served.before_LE, served.home_LE, 1.0, topology, costs),
        home_bytes=served.home_moves * (model.expert_bytes + model.expert_parameters * STATE_BYTES) / ranks,
        fetched_bytes=float(loads.fetches_SML.sum(axis=(1, 2)).mean()) * model.expert_bytes / ranks,
    )


def _checked(problem: BalancerInput) -> BalancerInput:
    """Refuse counts and homes that do not fit."""
    ranks, shape = problem.topology.num_ranks, problem.home_LE.shape
    counts_MLGE = check_counts(problem.counts_MLGE, num_ranks=ranks)
    known = shape if problem.previous_LE is None else problem.previous_LE.shape
    if shape != counts_MLGE.shape[1::2] or known != shape:
        raise CountsError(
            f"counts are {list(counts_MLGE.shape)}, homes {list(shape)} and those of the step before {list(known)}; "
            "expected [M, L, G, E], [L, E] and [L, E]"
        )
    return replace(problem, counts_MLGE=counts_MLGE)


@dataclass(frozen=True, eq=False)
class TimedPlan:
    """A plan, and how it came about."""

    plan: StepPlan  # of a step
    why: dict[str, str]  # by priced option whether it is on and by pass what is executed, with the reason
    elapsed_s: float  # wall time of planning
    planning_s: float  # the same in processor seconds


def timed_plan(problem: BalancerInput, options: PlanOptions, on_progress: OnProgress | None = None) -> TimedPlan:
    """Plan a step, which has its costs, and time it; raises `InputError` as `plan`."""
    homes, costs, topology = problem.home_LE, problem.costs, problem.topology
    # a user waits for the one; methods are compared by the other, which other work on the machine does not lengthen
    before, before_cpu = time.perf_counter(), time.process_time()
    squares_MG = problem.squares_MG
    found, why = plan_and_why(
        problem.counts_MLGE,
        topology,
        options,
        home_LE=homes,
        costs=costs,
        squares_MG=squares_MG,
        on_progress=on_progress,
    )
    elapsed_s, planning_s = time.perf_counter() - before, time.process_time() - before_cpu
    return TimedPlan(found, {name.replace("_", "-"): reason for name, reason in why.items()}, elapsed_s, planning_s)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanComparison:
    """A plan and the methods beside it, for a page."""

    plan: StepPlan  # of the step
    # static first; the plan as executors serve it last. Where a pass runs at homes, the plan as if both passes ran by
    # it stands before it, named `AS_PLANNED`.
    methods: tuple[PricedMethod, ...]
    # loads of static, and of the plan if both passes ran by it
    at_home: Loads
    planned: Loads
    # [M, L], the least load of a slowest rank under any plan of the same homes and slots, over the mean load; 1 where a
    # cell is empty
    least_over_mean_ML: Floats
    least_s: float  # no plan takes less for the step, by the cost model; see `pricing.least_seconds`
    once_s: float  # what the plan takes once a step, as priced: planning, votes, publishing; 0 where no pass runs by it
    elapsed_s: float  # wall time of planning; records have processor seconds
    unpriced: tuple[str, ...]  # what the cost model has at 0 seconds where it does not price planning: that, and votes

    @property
    def saved_s(self) -> float:
        """Seconds that the plan saves as it is executed, against static; homes that move are paid from it."""
        return self.methods[0].step_s - self.methods[-1].step_s

    @property
    def waited_s(self) -> float:
        """Seconds of planning that a step waits for, measured: by the clock, which other work on the machine lengthens,
        or of the processors, which several threads add up to more.
        """
        return min(self.elapsed_s, self.methods[-1].planning_s)

    @property
    def pays(self) -> bool:
        """Say whether it saves more than it takes once a step; planning as it was measured, where it has no price."""
        return self.saved_s > self.once_s + (self.waited_s if self.unpriced else 0.0)

    @property
    def passes_by_plan(self) -> list[PassName]:
        """The passes that executors run by the plan; they run the others with every expert at its home."""
        return [pass_name for pass_name in PASS_NAMES if not self.plan.is_at_home(pass_name)]


def compare_plan(
    found: TimedPlan,
    problem: BalancerInput,
    balancers: Mapping[str, Balancer] = BALANCERS,
    on_progress: Callable[[int, int], None] | None = None,
) -> PlanComparison:
    """Set a plan beside balancers, of which static is one; `on_progress` is told how many are done, of how many.

    Raises `CountsError` when the counts of `problem` are of another shape than the plan's.
    """
    plan, counts, costs = found.plan, problem.counts_MLGE, problem.costs
    assert costs is not None, "pages have seconds"
    methods = []
    for done, record in enumerate(compare(problem, costs, balancers), 1):
        methods.append(record)
        if on_progress is not None:
            on_progress(done, len(balancers))
    executed = figures_of(plan, problem, costs, label="foreroute", planning_s=found.planning_s)
    # without gains nothing is decided: both passes are those of the plan
    planned = ServedStep.of(replace(plan, gains={}), problem, found.planning_s)
    # beside what is executed, so that a reader sees why the plan is not
    if len(plan.hosts.expert_R) and any(plan.is_at_home(pass_name) for pass_name in PASS_NAMES):
        methods.append(record_of(planned, plan.topology, costs, name=AS_PLANNED, label="foreroute, as planned"))
    mean_ML = counts.sum(axis=(2, 3), dtype=np.int64) / plan.topology.num_ranks
    return PlanComparison(
        plan=plan,
        methods=(*methods, replace(executed, name="foreroute")),
        at_home=all_at_home(problem).loads(problem.topology),
        planned=planned.loads(problem.topology),
        least_over_mean_ML=over(plan.bound_ML, mean_ML),
        least_s=float(least_seconds(counts, plan.topology, costs, problem.squares_MG).sum()),
        once_s=0.0 if all(map(plan.is_at_home, PASS_NAMES)) else costs.step_seconds(plan.hosts, plan.topology),
        elapsed_s=found.elapsed_s,
        unpriced=costs.unpriced,
    )
