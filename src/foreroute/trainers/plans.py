"""Plans in the steps of a trainer: known micro-batches are counted, planned and executed; sums of that are logged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.costs import CostModel
from foreroute.ep import PlanExecution
from foreroute.errors import shown
from foreroute.plan import StepPlan, Topology
from foreroute.plan.options import PRICED, PassName, PlanOptions
from foreroute.planner import plan
from foreroute.trainers.checks import refuse


def plan_options(given: object, costs: CostModel | None, *, packs: bool = False) -> PlanOptions:
    """Read the options of a trainer's plans, `PlanOptions` or a table of them.

    Raises `ConfigError` for what the planner does not know, and for what a trainer that moves no homes, has no prices,
    or does not pack by routes, cannot carry out.
    """
    options = PlanOptions.from_table(given)
    unpriced = [name for name in PRICED if getattr(options, name) and costs is None]
    refuse(
        "the plan's options have",
        [
            (
                options.home_moves != 0,
                f"home_moves={shown(options.home_moves)}, and homes stay, where checkpoints and weight syncs look for "
                "experts; expected 0",
            ),
            (not options.replicas, "replicas=False, and homes stay, so that plans are made of replicas; expected True"),
            (
                bool(unpriced),
                f"{' and '.join(unpriced)} on, and no prices; expected a topology file with rates, or leave them out",
            ),
            (
                options.packing != "length" and not packs,
                f"packing={options.packing!r}, and micro-batches stay as the trainer makes them; expected 'length'",
            ),
        ],
    )
    return options


class PlannedPasses:
    """Executes passes of a model whose experts ranks share under plans, with sums over cells until a trainer logs.

    With prices, a pass runs at homes where its plan saves too little.
    """

    def __init__(self, routed: Any, topology: Topology, costs: CostModel | None, options: PlanOptions) -> None:
        self._routed, self._topology, self._costs = routed, topology, costs
        self._options = replace(options, packing="length")  # of micro-batches that are packed
        self._slowest: Counter[str] = Counter()
        self._all: Counter[str] = Counter()
        self._rows_off, self._replicas = 0, 0

    @contextmanager
    def executing(
        self,
        micro_batches: Sequence[Any],
        pass_name: PassName,
        *,
        num_at_home: int = 0,
        is_first: bool = True,  # of the ranks that share experts, so that it plans for all
    ) -> Iterator[Callable[[], None]]:
        """Run these micro-batches of this rank under a plan of all ranks. A collective call on entering and leaving.

        While a thread of the first rank plans, the first `num_at_home` run at home. Behind them call what this gives, a
        collective call too, which waits until the plan is made.
        """
        routed, home_LE = self._routed, self._routed.home_LE
        counts_MLGE = routed.gather_counts(micro_batches)
        # homes stay: checkpoints and weight syncs of the framework look for experts where it put them
        make: Callable[[], StepPlan]
        counts, costs = counts_MLGE[num_at_home:], self._costs
        make = partial(plan, counts, self._topology, self._options, home_LE=home_LE, costs=costs)
        if num_at_home and is_first:
            thread = ThreadPoolExecutor(1, "foreroute-plan")
            make = thread.submit(make).result
            thread.shutdown(wait=False)
        executions: list[PlanExecution] = []
        with ExitStack() as active:

            def execute(made: StepPlan | None, part: slice) -> None:
                execution = routed.execute(made, counts_MLGE[part], micro_batches[part])
                executions.append(active.enter_context(execution))

            def execute_plan() -> None:
                active.close()
                execute(routed.share_plan(make), slice(num_at_home, None))

            if num_at_home:
                execute(None, slice(num_at_home))
            else:
                execute_plan()
            yield execute_plan
        executed_MLG = routed.spread.gather_executed(executions)
        self._add([each.passes[pass_name].plan for each in executions], counts_MLGE, executed_MLG, num_at_home)

    def _add(
        self,
        plans: Sequence[StepPlan],  # by which the micro-batches ran, one after the other
        counts_MLGE: NDArray[np.integer],
        executed_MLG: NDArray[np.int64],  # assignments that the experts of a rank computed
        first: int,  # micro-batches that ran before the plan
    ) -> None:
        cells = [plan.cell(m, layer) for plan in plans for m, layer in np.ndindex(plan.shape[:2])]
        counts_CGE = counts_MLGE.reshape(len(cells), *counts_MLGE.shape[2:])
        loads = [cell.loads_G(counts_GE) for cell, counts_GE in zip(cells, counts_CGE, strict=True)]
        planned_MLG = np.reshape(loads, executed_MLG.shape)
        ranks = range(executed_MLG.shape[-1])
        at_home_MLG = np.stack([(counts_MLGE.sum(2) * (self._routed.home_LE == rank)).sum(2) for rank in ranks], -1)
        parts = {
            "static": at_home_MLG[first:],
            "planned": planned_MLG[first:],
            "executed": executed_MLG[first:],
            "first": executed_MLG[:first],
        }
        for name, part_MLG in parts.items():
            self._slowest[name] += int(part_MLG.max(-1).sum()) * part_MLG.shape[-1]
            self._all[name] += int(part_MLG.sum())
        self._rows_off += int(np.abs(executed_MLG - planned_MLG).sum())
        self._replicas += sum(int(plan.num_replicas_ML.sum()) for plan in plans)

    def flush(self) -> dict[str, float]:
        """Give what is to be logged, by name, nothing where no plan ran, and start anew.

        - plan/imbalance_static, _planned, _executed: assignments of the slowest rank over those of the mean one, over
          the cells of all micro-batches under a plan: at homes, by the plan, and as experts computed them.
        - plan/imbalance_first: of the first micro-batches, which ran before the plan, as experts computed them.
        - plan/rows_off: assignments that a rank computed more or less than planned, over all cells.
        - plan/replicas: how many there were, over all cells.
        """
        logs = {f"plan/imbalance_{name}": self._slowest[name] / total for name, total in self._all.items() if total}
        if logs:
            logs |= {"plan/rows_off": float(self._rows_off), "plan/replicas": float(self._replicas)}
        self._slowest, self._all, self._rows_off, self._replicas = Counter(), Counter(), 0, 0
        return logs
