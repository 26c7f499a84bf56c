"""Plans and other balancers on the same counts: one record for each, cell by cell and without keeping cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.figures import price_cell
from foreroute.costs.model import CostModel
from foreroute.errors import CountsError
from foreroute.plan.counts import check_counts
from foreroute.plan.step_plan import CellHosts, StepPlan
from foreroute.plan.topology import Topology
from foreroute.planner.balancers import BALANCERS, Balancer, BalancerInput
from foreroute.planner.methods import run_method


@dataclass(frozen=True, kw_only=True)
class BalancerRecord:
    """One method on one step. Cells without assignments count in sums and as balanced.

    Attributes:
        name: short.
        label: for tables.
        cells: M * L.
        imbalance_mean, imbalance_p99, imbalance_worst: over cells, the slowest rank's load over the mean load.
        slowest_load: sum over cells of the slowest rank's assignments.
        of_bound: the least that any plan can have of those, over what this one has; the bound is the mean load of each
            cell, in whole assignments.
        seconds: sum over cells of recompute and update, by the cost model.
        fetches_per_cell: experts whose weights are moved for a cell.
        node_bytes, cluster_bytes: of those weights in the whole step, from a home in the same node and in another.
        home_moves: experts that get another home before the step.
        cross_node_share: of all assignments, those served on another node than their token's.
        planning_s: seconds of planning, from counts to token splits: processor time, or as `record_of` was told.
    """

    name: str
    label: str
    cells: int
    imbalance_mean: float
    imbalance_p99: float
    imbalance_worst: float
    slowest_load: int
    of_bound: float
    seconds: float
    fetches_per_cell: float
    node_bytes: float
    cluster_bytes: float
    home_moves: int
    cross_node_share: float
    planning_s: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def compare(
    problem: BalancerInput, costs: CostModel, balancers: Mapping[str, Balancer] = BALANCERS
) -> Iterator[BalancerRecord]:
    """Yield a record for each balancer. Those that plan from the step before are skipped when it is not known.

    Args:
        problem: the step. Its prices are those of `costs`, whatever it says.
        costs: the cost model.
        balancers: by short name.

    Raises:
        CountsError, TopologyError: when counts, homes and ranks do not fit each other.
    """
    problem = _checked(problem)
    num_layers = len(problem.home_LE)
    for name, balancer in balancers.items():
        if balancer.knows == "previous step" and problem.previous_LE is None:
            continue
        sums, run = _Sums(), run_method(balancer, problem, costs)
        for cell, hosts in enumerate(run.cells):
            home_E = run.home_LE[cell % num_layers]
            if cell < num_layers:  # what moves home before the step is no transfer of its first cell
                fetched_H = hosts.fetched_H & (home_E[hosts.expert_H] != hosts.rank_H)
                hosts = replace(hosts, fetched_H=fetched_H)
            sums.add(hosts, home_E, problem.topology, costs)
        yield sums.record(name, balancer.label, costs, len(run.home_moves), run.planning_s)


def record_of(
    plan: StepPlan, counts_MLGE: NDArray[np.integer], costs: CostModel, *, label: str, planning_s: float
) -> BalancerRecord:
    """The record of a plan that is there already.

    Args:
        plan: of these counts; `verify` says whether it is.
        counts_MLGE: integers [M, L, G, E].
        costs: the cost model.
        label: its name.
        planning_s: seconds that it took.

    Raises:
        CountsError: when the counts are of another shape than the plan's.
    """
    num_micro_steps, num_layers, num_experts = plan.shape
    expected = (num_micro_steps, num_layers, plan.topology.num_ranks, num_experts)
    if counts_MLGE.shape != expected:
        raise CountsError(f"counts are {list(counts_MLGE.shape)}; the plan is for {list(expected)}")
    sums = _Sums()
    for m, layer in np.ndindex(num_micro_steps, num_layers):
        sums.add(CellHosts.of(plan.cell(m, layer), counts_MLGE[m, layer]), plan.home_LE[layer], plan.topology, costs)
    return sums.record(label, label, costs, len(plan.home_moves), planning_s)


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


@dataclass
class _Sums:
    """Running figures of one method."""

    ratios: list[float] = field(default_factory=list)
    slowest: int = 0
    least: int = 0
    total: int = 0
    crossing: float = 0.0
    seconds: float = 0.0
    node_fetches: int = 0
    cluster_fetches: int = 0

    def add(self, hosts: CellHosts, home_E: NDArray[np.integer], topology: Topology, costs: CostModel) -> None:
        figures = price_cell(hosts, home_E, topology, costs)
        total, slowest = int(figures.loads_G.sum()), int(figures.loads_G.max())
        self.ratios.append(slowest / total * len(figures.loads_G) if total else 1.0)
        self.slowest += slowest
        self.least += -(-total // len(figures.loads_G))
        self.total += total
        self.crossing += figures.cross_node_share * total
        self.seconds += figures.seconds
        node_G = topology.node_G
        fetched_H = hosts.fetched_H
        near = int((node_G[hosts.rank_H] == node_G[home_E[hosts.expert_H]])[fetched_H].sum())
        self.node_fetches += near
        self.cluster_fetches += int(fetched_H.sum()) - near

    def record(self, name: str, label: str, costs: CostModel, home_moves: int, planning_s: float) -> BalancerRecord:
        cells, size = len(self.ratios), costs.model.expert_bytes
        return BalancerRecord(
            name=name,
            label=label,
            cells=cells,
            imbalance_mean=float(np.mean(self.ratios)),
            imbalance_p99=float(np.quantile(self.ratios, 0.99)),
            imbalance_worst=max(self.ratios),
            slowest_load=self.slowest,
            of_bound=self.least / self.slowest if self.slowest else 1.0,
            seconds=self.seconds,
            fetches_per_cell=(self.node_fetches + self.cluster_fetches) / cells,
            node_bytes=self.node_fetches * size,
            cluster_bytes=self.cluster_fetches * size,
            home_moves=home_moves,
            cross_node_share=self.crossing / self.total if self.total else 0.0,
            planning_s=planning_s,
        )
