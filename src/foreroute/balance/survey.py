"""A step before and after a plan, cell by cell, as arrays: for tables and pages.

Before is what happens without balancing: every expert is served at the home that it had when the step began.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.balance.assignment import Assignment
from foreroute.balance.costs import CostModel
from foreroute.balance.evaluate import evaluate
from foreroute.balance.step_plan import CellPlan, StepPlan
from foreroute.balance.time_bound import least_seconds
from foreroute.errors import CountsError

STAGES = ("recompute", "update")
PARTS = ("attention", "all-to-all", "experts", "fixed", "exposed transfers")

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Side:
    """A step under one way of serving it.

    Attributes:
        loads_MLG: int64 [M, L, G], assignments that each rank serves.
        crossing_ML: [M, L], share of assignments that are served on another node than their token's.
        parts_MLSP: [M, L, 2, 5], seconds of `STAGES` and `PARTS`, by the cost model.
    """

    loads_MLG: NDArray[np.int64]
    crossing_ML: Floats
    parts_MLSP: Floats

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
    def crossing(self) -> float:
        """Of all assignments of the step, those served on another node than their token's."""
        total_ML = self.loads_MLG.sum(axis=2)
        return float((self.crossing_ML * total_ML).sum() / max(int(total_ML.sum()), 1))

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return float(self.parts_MLSP.sum())


@dataclass(frozen=True, eq=False, kw_only=True)
class Survey:
    """What a step is like, and what a plan makes of it.

    Attributes:
        before: without balancing.
        after: under the plan.
        bound_ML: [M, L], the plan's own bound over the mean load; 1 where a cell is empty.
        least_seconds: no plan takes less for the step, by the cost model; see `least_seconds`.
        fluctuation_ML: [M, L], share of the assignments of a cell that would go to other experts if the cell were like
            its layer in the whole step (total variation distance); NaN where a cell is empty.
        drift_L: [L], the same of the step against the step before, or None where that is not known.
        step_imbalance_L: [L], the slowest rank over the mean if the step were one cell, without balancing: all that a
            balancer sees which plans once for the step.
        fetched_ML: int64 [M, L], replicas whose weights are moved for the cell.
    """

    before: Side
    after: Side
    bound_ML: Floats
    least_seconds: float
    fluctuation_ML: Floats
    drift_L: Floats | None
    step_imbalance_L: Floats
    fetched_ML: NDArray[np.int64]

    @property
    def most_uneven_layer(self) -> int:
        """The layer, from 0, whose cells are the most uneven on average without balancing."""
        return int(self.before.imbalance_ML.mean(axis=0).argmax())


def survey(
    plan: StepPlan,
    counts_MLGE: NDArray[np.integer],
    costs: CostModel,
    *,
    previous_LE: NDArray[np.integer] | None = None,
) -> Survey:
    """Look at every cell of a step, without and with its plan.

    Args:
        plan: of these counts; `verify` says whether it is.
        counts_MLGE: integers [M, L, G, E].
        costs: the cost model.
        previous_LE: integers [L, E], assignments of the step before, when they are known.

    Raises:
        CountsError: when the step before is of other layers or experts.
    """
    step_LE = counts_MLGE.sum(axis=(0, 2), dtype=np.int64)
    if previous_LE is not None and previous_LE.shape != step_LE.shape:
        raise CountsError(
            f"the step before has {list(previous_LE.shape)} layers and experts, this one {list(step_LE.shape)}"
        )
    before = _side(plan, counts_MLGE, costs, planned=False)
    after = _side(plan, counts_MLGE, costs, planned=True)
    step_loads_LG = before.loads_MLG.sum(axis=0)
    cell_R = np.repeat(np.arange(len(plan.offsets) - 1), np.diff(plan.offsets))
    return Survey(
        before=before,
        after=after,
        bound_ML=_over(plan.bound_ML, after.loads_MLG.mean(axis=2)),
        least_seconds=float(least_seconds(counts_MLGE, plan.topology, costs).sum()),
        fluctuation_ML=_distance(counts_MLGE.sum(axis=2, dtype=np.int64), step_LE),
        drift_L=None if previous_LE is None else _distance(step_LE, previous_LE),
        step_imbalance_L=_over(step_loads_LG.max(axis=1), step_loads_LG.mean(axis=1)),
        fetched_ML=np.bincount(cell_R[plan.fetched_R], minlength=len(plan.offsets) - 1).reshape(plan.shape[:2]),
    )


def _side(plan: StepPlan, counts_MLGE: NDArray[np.integer], costs: CostModel, *, planned: bool) -> Side:
    num_micro_steps, num_layers, num_ranks, _ = counts_MLGE.shape
    loads_MLG = np.empty((num_micro_steps, num_layers, num_ranks), np.int64)
    crossing_ML = np.empty((num_micro_steps, num_layers))
    parts_MLSP = np.empty((num_micro_steps, num_layers, len(STAGES), len(PARTS)))
    for m, layer in np.ndindex(num_micro_steps, num_layers):
        cell = plan.cell(m, layer) if planned else _without_replicas(plan.previous_home_LE[layer], num_ranks)
        assignment = Assignment.of(cell, counts_MLGE[m, layer])
        figures = evaluate(assignment, cell.home_E, plan.topology, costs)
        loads_MLG[m, layer], crossing_ML[m, layer] = figures.loads_G, figures.cross_node_share
        parts_MLSP[m, layer] = figures.recompute, figures.update
    return Side(loads_MLG=loads_MLG, crossing_ML=crossing_ML, parts_MLSP=parts_MLSP)


def _without_replicas(home_E: NDArray[np.int16], num_ranks: int) -> CellPlan:
    none = np.empty(0, np.int16)
    return CellPlan(home_E, none, none, none, np.empty(0, np.bool_), np.empty((0, num_ranks), np.int32))


def _distance(loads_XE: NDArray[np.integer], reference_XE: NDArray[np.integer]) -> Floats:
    """Total variation distance of shares along the last axis; NaN where either is empty."""
    totals = [loads.sum(axis=-1, keepdims=True) for loads in (loads_XE, reference_XE)]
    shares = [
        np.divide(loads, total, out=np.full(loads.shape, np.nan), where=total > 0)
        for loads, total in zip((loads_XE, reference_XE), totals, strict=True)
    ]
    distance: Floats = np.abs(shares[0] - shares[1]).sum(axis=-1) / 2
    return distance


def _over(values: NDArray[np.number], mean: NDArray[np.number]) -> Floats:
    ratio: Floats = np.ones(np.broadcast_shapes(values.shape, mean.shape))
    np.divide(values, mean, out=ratio, where=mean > 0)
    return ratio
