"""Plans and balancers on the same counts: figures of every cell, by the cost model, each cell priced once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel
from foreroute.costs.pricing import PART_NAMES, least_seconds, price_cell
from foreroute.errors import CountsError
from foreroute.plan.counts import check_counts
from foreroute.plan.options import PASS_NAMES
from foreroute.plan.step_plan import StepPlan
from foreroute.plan.topology import Topology
from foreroute.simulate.balancers import Balancer, BalancerInput
from foreroute.simulate.methods import BALANCERS, ServedStep, serve

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class MethodFigures:
    """One method on one step. Cells without assignments count in sums and as balanced.

    Attributes:
        name: short.
        label: for tables.
        loads_MLG: int64 [M, L, G], assignments that each rank serves.
        crossing_ML: [M, L], share of assignments that are served on another node than their token's.
        fetches_ML: int64 [M, L], experts whose weights are moved for the cell.
        parts_MLSP: [M, L, 2, 5], seconds of `plan.options.PASS_NAMES` and `pricing.PART_NAMES`.
        home_moves: experts that get another home before the step.
        planning_s: seconds of planning, from counts to token splits: processor time, or as `figures_of` was told.
    """

    name: str
    label: str
    loads_MLG: Ints
    crossing_ML: Floats
    fetches_ML: Ints
    parts_MLSP: Floats
    home_moves: int
    planning_s: float

    @property
    def over_mean_MLG(self) -> Floats:
        """[M, L, G], load of every rank over the mean of its cell; 1 where a cell is empty."""
        return _over(self.loads_MLG, self.loads_MLG.mean(axis=2, keepdims=True))

    @property
    def imbalance_ML(self) -> Floats:
        """[M, L], the slowest rank's."""
        imbalance_ML: Floats = self.over_mean_MLG.max(axis=2)
        return imbalance_ML

    @property
    def cross_node_share(self) -> float:
        """Share of the assignments of the step that are served on another node than their token's."""
        total_ML = self.loads_MLG.sum(axis=2)
        return float((self.crossing_ML * total_ML).sum() / max(int(total_ML.sum()), 1))

    @property
    def fetches_per_cell(self) -> float:
        """On average."""
        return float(self.fetches_ML.mean())

    @property
    def seconds(self) -> float:
        """Recompute and update of the whole step."""
        return float(self.parts_MLSP.sum())


def compare(
    problem: BalancerInput, costs: CostModel, balancers: Mapping[str, Balancer] = BALANCERS
) -> Iterator[MethodFigures]:
    """Yield the figures of each balancer. Those that plan from the step before are skipped when it is not known.

    Args:
        problem: the step; its costs are these, whatever it says.
        costs: the cost model.
        balancers: by short name.

    Raises:
        CountsError, TopologyError: when counts, homes and ranks do not fit each other.
    """
    problem = _checked(problem)
    for name, balancer in balancers.items():
        if balancer.knows != "previous step" or problem.previous_LE is not None:
            yield _figures(serve(balancer, problem, costs), problem.topology, costs, name, balancer.label)


def figures_of(
    plan: StepPlan, counts_MLGE: NDArray[np.integer], costs: CostModel, *, label: str, planning_s: float
) -> MethodFigures:
    """The figures of a plan that is there already.

    Args:
        plan: of these counts; `verify` says whether it is.
        counts_MLGE: integers [M, L, G, E].
        costs: the cost model.
        label: its name, for people too.
        planning_s: seconds that it took.

    Raises:
        CountsError: when the counts are of another shape than the plan's.
    """
    num_micro_steps, num_layers, num_experts = plan.shape
    expected = (num_micro_steps, num_layers, plan.topology.num_ranks, num_experts)
    if counts_MLGE.shape != expected:
        raise CountsError(f"counts are {list(counts_MLGE.shape)}; the plan is for {list(expected)}")
    return _figures(ServedStep.of(plan, counts_MLGE, planning_s), plan.topology, costs, label, label)


def _figures(served: ServedStep, topology: Topology, costs: CostModel, name: str, label: str) -> MethodFigures:
    """Price all cells."""
    shape = _, num_layers = served.counts_MLGE.shape[:2]
    loads_MLG, fetches_ML = np.empty((*shape, topology.num_ranks), np.int64), np.empty(shape, np.int64)
    crossing_ML, parts_MLSP = np.empty(shape), np.empty((*shape, len(PASS_NAMES), len(PART_NAMES)))
    home_moves = 0
    for c, cell in enumerate(served.cells):
        place = divmod(c, num_layers)
        priced = price_cell(cell, served.counts_MLGE[place], topology, costs, served.slots)
        loads_MLG[place], crossing_ML[place], parts_MLSP[place] = (
            priced.loads_G,
            priced.cross_node_share,
            priced.parts_SP,
        )
        fetches_ML[place] = cell.fetched_R.sum()
        if c < num_layers:
            home_moves += int((cell.home_E != served.before_LE[c]).sum())
    return MethodFigures(
        name=name,
        label=label,
        loads_MLG=loads_MLG,
        crossing_ML=crossing_ML,
        fetches_ML=fetches_ML,
        parts_MLSP=parts_MLSP,
        home_moves=home_moves,
        planning_s=served.planning_s,
    )


def _checked(problem: BalancerInput) -> BalancerInput:
    ranks, shape = problem.topology.num_ranks, problem.home_LE.shape
    counts_MLGE = check_counts(problem.counts_MLGE, num_ranks=ranks)
    known = shape if problem.previous_LE is None else problem.previous_LE.shape
    if shape != counts_MLGE.shape[1::2] or known != shape:
        raise CountsError(
            f"counts are {list(counts_MLGE.shape)}, homes {list(shape)} and those of the step before {list(known)}; "
            "expected [M, L, G, E], [L, E] and [L, E]"
        )
    return replace(problem, counts_MLGE=counts_MLGE)


@dataclass(frozen=True, eq=False, kw_only=True)
class StepFacts:
    """What a step is like, and what no plan can do better in it.

    Attributes:
        least_over_mean_ML: [M, L], the least load of a slowest rank under any plan of the same homes and slots, over
            the mean load; 1 where a cell is empty.
        least_seconds: no plan takes less for the step, by the cost model; see `pricing.least_seconds`.
    """

    least_over_mean_ML: Floats
    least_seconds: float


def facts_of(plan: StepPlan, counts_MLGE: NDArray[np.integer], costs: CostModel) -> StepFacts:
    """Look at the step that a plan was made for.

    Args:
        plan: of these counts; it knows its bounds.
        counts_MLGE: integers [M, L, G, E].
        costs: the cost model.
    """
    mean_ML = counts_MLGE.sum(axis=(2, 3), dtype=np.int64) / plan.topology.num_ranks
    return StepFacts(
        least_over_mean_ML=_over(plan.bound_ML, mean_ML),
        least_seconds=float(least_seconds(counts_MLGE, plan.topology, costs).sum()),
    )


def _over(values: NDArray[np.number], mean: NDArray[np.number]) -> Floats:
    ratio: Floats = np.ones(np.broadcast_shapes(values.shape, mean.shape))
    np.divide(values, mean, out=ratio, where=mean > 0)
    return ratio
