"""A step plan with other cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.balance.step_plan import CellPlan, StepPlan
from foreroute.errors import CountsError


def check_counts(plan: StepPlan, counts_MLGE: NDArray[np.integer]) -> None:
    """Refuse counts that cannot be those of a plan.

    Raises:
        CountsError: when they have another shape.
    """
    num_micro_steps, num_layers, num_experts = plan.shape
    expected = (num_micro_steps, num_layers, plan.topology.num_ranks, num_experts)
    if counts_MLGE.shape != expected:
        raise CountsError(f"counts are {list(counts_MLGE.shape)}; the plan is for {list(expected)}")


def revised(plan: StepPlan, cells: Sequence[CellPlan], counts_MLGE: NDArray[np.integer]) -> StepPlan:
    """The plan with these cells, M * L in execution order, and with their largest loads.

    Bounds and homes stay: they do not depend on replicas.
    """
    if not cells:
        return plan
    num_micro_steps, num_layers, _ = plan.shape
    loads = [cell.loads_G(counts_MLGE[c // num_layers, c % num_layers]).max() for c, cell in enumerate(cells)]
    names = ("expert_R", "rank_R", "slot_R", "fetched_R", "tokens_RG")
    arrays: dict[str, Any] = {name: np.concatenate([getattr(cell, name) for cell in cells]) for name in names}
    return replace(
        plan,
        offsets=np.concatenate([[0], np.cumsum([len(cell.expert_R) for cell in cells])]).astype(np.int64),
        max_load_ML=np.array(loads, np.int64).reshape(num_micro_steps, num_layers),
        **arrays,
    )
