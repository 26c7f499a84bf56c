"""Every way to serve a step, by name: the balancers of the wheel, and plans of ours; and how one is run and timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from foreroute.costs.model import CostModel
from foreroute.plan.options import PlanOptions, SlotUse
from foreroute.plan.step_plan import CellHosts
from foreroute.planner.balancers import BALANCERS, Balancer, BalancerInput
from foreroute.planner.plan_step import plan


@dataclass(frozen=True)
class Ours:
    """A way to call our planner.

    Attributes:
        label: for tables.
        options: of the planner.
        redundant_slots: instead of the topology's.
        knows: as of a `Balancer`.
    """

    label: str
    options: PlanOptions
    redundant_slots: int | None = None
    knows: str = "micro-step"


OURS = {
    "ours": Ours("foreroute", PlanOptions(tolerance=0.02)),
    "ours_exact": Ours("foreroute, exact", PlanOptions(tolerance=0.0)),
    "ours_rehomed": Ours("foreroute, 16 home moves a layer", PlanOptions(tolerance=0.02, home_moves=16)),
    "ours_traffic": Ours(
        "foreroute, 8 slots against traffic", PlanOptions(tolerance=0.02, slots="shared", traffic=True), 8
    ),
}
"""Plans of ours, by short name. Options not named are defaults."""

METHODS: dict[str, Balancer | Ours] = {**BALANCERS, **OURS}
"""By short name, in the order of tables."""


@dataclass(eq=False)
class MethodRun:
    """A step as one method serves it, cell by cell.

    Attributes:
        before_LE: int64 [L, E], the homes when the step begins.
        home_LE: int64 [L, E], the homes during the step; of a layer, once its first cell was taken.
        slots: whose the slots are.
        planning_s: processor time of planning the cells that were taken; so other work on this machine does not count.
        cells: the hosts of each, once, in the order of execution.
    """

    before_LE: NDArray[np.int64]
    home_LE: NDArray[np.int64]
    slots: SlotUse
    planning_s: float = 0.0
    cells: Iterator[CellHosts] = field(default_factory=lambda: iter(()))

    @property
    def home_moves(self) -> NDArray[np.int64]:
        """int64 [moves, 4]: layer, expert, rank before, rank after."""
        layer, expert = np.nonzero(self.home_LE != self.before_LE)
        return np.stack([layer, expert, self.before_LE[layer, expert], self.home_LE[layer, expert]], axis=1)


def run_method(method: Balancer | Ours, problem: BalancerInput, costs: CostModel) -> MethodRun:
    """Serve a step by one method. Compiling is done first, and is no part of planning.

    Args:
        method: one of `METHODS`, or a balancer of yours.
        problem: the step. Its prices are those of `costs`, whatever it says.
        costs: the cost model.

    Raises:
        CountsError: when a balancer plans from the step before, and the problem knows nothing of it.
    """
    previous = None if problem.previous_LE is None else problem.previous_LE[:1]
    first = replace(problem, counts_MLGE=problem.counts_MLGE[:1, :1], home_LE=problem.home_LE[:1], previous_LE=previous)
    before_LE = problem.home_LE.astype(np.int64)
    if isinstance(method, Balancer):
        next(method.method(priced(first, costs)))
        run = MethodRun(before_LE, before_LE.copy(), method.slots)
        run.cells = _timed(method, priced(problem, costs), run)
        return run
    topology, options = problem.topology, method.options
    if method.redundant_slots is not None:
        topology = replace(topology, redundant_slots=method.redundant_slots)
    plan(first.counts_MLGE, topology, options, home_LE=first.home_LE, costs=costs)
    before = time.process_time()
    found = plan(problem.counts_MLGE, topology, options, home_LE=problem.home_LE, costs=costs)
    planning_s = time.process_time() - before
    cells = (CellHosts.of(found.cell(*c), problem.counts_MLGE[c]) for c in np.ndindex(*found.shape[:2]))
    return MethodRun(before_LE, found.home_LE.astype(np.int64), options.slots, planning_s, cells)


def _timed(balancer: Balancer, problem: BalancerInput, run: MethodRun) -> Iterator[CellHosts]:
    before = time.process_time()
    for cell, hosts in enumerate(balancer.method(problem)):
        run.planning_s += time.process_time() - before
        if balancer.rehomes and cell < len(run.home_LE):
            # the first host of each expert becomes its home
            _, first_E = np.unique(hosts.expert_H, return_index=True)
            run.home_LE[cell] = hosts.rank_H[first_E]
        yield hosts
        before = time.process_time()


def priced(problem: BalancerInput, costs: CostModel) -> BalancerInput:
    """The problem with seconds of a whole step: of one assignment, of one that crosses nodes, of one fetch."""
    prices = costs.prices(problem.topology)
    groups = prices.groups
    serve_s = sum(
        forward * (prices.row_s + prices.pair_s)
        + backward * (prices.row_s * prices.backward_gemm + prices.pair_s * prices.backward_memory)
        for _, forward, backward in groups
    )
    legs = 2 * sum(forward + backward for _, forward, backward in groups)  # a dispatch and a combine in each pass
    return replace(
        problem,
        assignment_s=serve_s,
        crossing_s=legs * prices.cluster_row_s,
        transfer_s=len(groups) * prices.host_fetch_s,
    )
