"""What plans did in the steps of a trainer, as sums that it logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreroute.plan import StepPlan


class PlanSums:
    """Sums over cells until a trainer logs."""

    def __init__(self) -> None:
        self._slowest: Counter[str] = Counter()
        self._all: Counter[str] = Counter()
        self._rows_off, self._replicas = 0, 0

    def add(
        self,
        plans: Sequence[StepPlan],  # by which the micro-batches ran, one after the other
        counts_MLGE: NDArray[np.integer],
        home_LE: NDArray[np.int16],
        executed_MLG: NDArray[np.int64],  # assignments that the experts of a rank computed
        *,
        first: int = 0,  # micro-batches that ran before the plan
    ) -> None:
        """Add the cells of a batch."""
        cells = [plan.cell(m, layer) for plan in plans for m, layer in np.ndindex(plan.shape[:2])]
        counts_CGE = counts_MLGE.reshape(len(cells), *counts_MLGE.shape[2:])
        loads = [cell.loads_G(counts_GE) for cell, counts_GE in zip(cells, counts_CGE, strict=True)]
        planned_MLG = np.reshape(loads, executed_MLG.shape)
        ranks = range(executed_MLG.shape[-1])
        at_home_MLG = np.stack([(counts_MLGE.sum(2) * (home_LE == rank)).sum(2) for rank in ranks], -1)
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
