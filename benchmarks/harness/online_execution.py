"""An executor that sees only now, on the product's own: the baseline of plans that are made ahead.

In every cell the ranks gather their counts, for which the host waits; each makes the plan of the cell from them; rows
go, and behind them the weights of the replicas; and experts compute. Rows, transfers, replicas, gradients and slots are
those of the product, in the same order: what differs is when a cell's plan is known.

What can be had without foresight is given to it. It agrees on nothing, publishes weights as the product does, and
asks for weights while home experts compute. What slots hold is not fetched again. A plan outlives its forward, so that
recomputation and backward neither gather nor plan, and backward fetches a cell ahead. Planning on the device, as MoonEP
does, would spare the wait of the host; the counts would still be gathered, and no weight could travel before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.harness.execution_bench import Bench
from benchmarks.harness.online_plans import Baseline
from foreroute.ep.dispatch import CellRows, gather_counts, upload_rows
from foreroute.ep.execution import MicroBatch, PassPlan, PlanExecution
from foreroute.ep.transfer.cells import Cell
from foreroute.plan import CellPlan, StepPlan, Topology
from foreroute.plan.capabilities import takes_host_memory
from foreroute.plan.hosts import Hosts
from foreroute.plan.schedule import CellSchedule, ExecutionSchedule


def executing_online(bench: Bench, baseline: Baseline, topology: Topology) -> AbstractContextManager[PlanExecution]:
    """Serve the micro-steps of a bench as a baseline does, while the context is open. Collective, as `execute` is.

    Args:
        bench: with the number of the step, and its micro-batches.
        baseline: which.
        topology: of the ranks; slots are the baseline's.
    """
    assert bench.routed.spread is not None, "it was loaded so"
    return bench.routed.spread.activate(bench.routed._of_trunk, OnlineExecution(bench, baseline, topology))


class OnlineExecution(PlanExecution):
    """What a baseline does in place of a plan. There is nothing to agree on ahead, so that nobody is asked.

    Attributes:
        plan: grows cell by cell; cells that have not begun have no replica. Without figures.
    """

    def __init__(self, bench: Bench, baseline: Baseline, topology: Topology) -> None:
        spread, num_micro_steps = bench.routed.spread, len(bench.rows_M)
        assert spread is not None, "it was loaded so"
        home_LE, num_ranks = spread.home_LE, topology.num_ranks
        num_layers, num_experts = home_LE.shape
        topology = replace(topology, redundant_slots=baseline.slots or num_experts // num_ranks)
        hosts = LateHosts.with_room(home_LE, num_micro_steps, num_ranks, num_ranks * topology.redundant_slots)
        loads_ML = np.zeros((num_micro_steps, num_layers), np.int64)
        plan = StepPlan(topology, home_LE, hosts, loads_ML, loads_ML.astype(np.float64), "", baseline.sharing)
        self._schedules, self._num_replicas_ML = OnlineSchedule(), np.zeros_like(loads_ML)
        hosted = OnlinePass(plan, self._schedules, plan, self._schedules, self._num_replicas_ML)
        batches = [
            MicroBatch(rows.trace, rows.counts_of(), rows.is_whole, int(rows.trace.valid_N.sum()))
            for rows in bench.rows_M
        ]
        engine = spread.engine(bench.homes)
        # counts are what the end of a step holds routers against
        super().__init__(
            Bench.number,
            plan,
            bench.counts_MLGE,
            batches,
            {"recompute": hosted, "update": hosted},
            [True] * num_micro_steps,
            keeps_weights=True,
            group=spread._group,
            chunks=[range(num_layers)],
            engine=engine,
            before_publishing=lambda: None,
        )
        self._planner = baseline.planner(home_LE, topology, baseline.sharing)
        self._known: dict[Cell, CellRows] = {}
        assert engine is not None, "there are layers"
        self._paths = engine.paths

    def upload_cells(
        self, micro_step: int, layers: Sequence[int], plan: PassPlan, device: torch.device
    ) -> dict[int, CellRows]:
        """None is known before it begins."""
        return {}

    def exchange_counts(self, cell: Cell, pass_plan: PassPlan, counts_E: Tensor) -> CellRows:
        """The rows of a cell; when it runs first, of the plan that is made for it now."""
        if cell not in self._known:
            counts_GE = gather_counts(self.group, counts_E, str(cell))
            plan = self._planner(cell.layer, counts_GE)
            schedule = CellSchedule.of(
                plan,
                counts_GE,
                self._rank,
                memory_ranks=self.plan.topology.ranks_per_node if takes_host_memory(self._paths) else 1,
                what=str(cell),
            )
            self._enter(cell, plan, schedule)
            (self._known[cell],) = upload_rows(counts_E.device, [schedule])
        return self._known[cell]

    def _enter(self, cell: Cell, plan: CellPlan, schedule: CellSchedule) -> None:
        """From now on the engine knows the cell, which comes behind all that it knows."""
        hosts, number = self.plan.hosts, cell.micro_step * self.plan.shape[1] + cell.layer
        begin = hosts.offsets[number]
        end = begin + len(plan.expert_R)
        for name in CellPlan._fields[1:]:
            getattr(hosts, name)[begin:end] = getattr(plan, name)
        hosts.offsets[number + 1 :] = end
        self._num_replicas_ML[cell.micro_step, cell.layer] = len(plan.expert_R)
        self._schedules.by_cell[cell.micro_step, cell.layer] = schedule


class OnlinePass(PassPlan):
    """A pass of which nobody knows ahead whether some rank will have a replica."""

    @property
    def is_at_home(self) -> bool:
        """See `PassPlan`."""
        return False


class LateHosts(Hosts):
    """Of cells that are learnt when they run, so that any expert may be sent."""

    def sent_LEW(self, ranks_per_node: int) -> NDArray[np.bool_]:
        """See `Hosts`."""
        return np.full((*self.home_LE.shape, ranks_per_node), ranks_per_node > 1)


class OnlineSchedule(ExecutionSchedule):
    """Schedules of the cells that have begun.

    Attributes:
        by_cell: by micro-step and layer.
    """

    def __init__(self) -> None:
        self.by_cell: dict[tuple[int, int], CellSchedule] = {}

    def cell(self, micro_step: int, layer: int) -> CellSchedule:
        """See `ExecutionSchedule`."""
        return self.by_cell[micro_step, layer]
