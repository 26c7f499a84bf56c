"""Every expert at its home, always."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from foreroute.balance.assignment import Assignment
from foreroute.balance.baselines.problem import Problem


def static(problem: Problem) -> Iterator[Assignment]:
    """Nothing is balanced and nothing moves."""
    expert_H = np.arange(problem.num_experts, dtype=np.int32)
    nothing_H = np.zeros(problem.num_experts, np.bool_)
    for layer, counts_GE in problem.cells():
        yield Assignment(expert_H, problem.home_LE[layer].astype(np.int32), counts_GE.T.copy(), nothing_H)
