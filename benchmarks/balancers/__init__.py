"""Balancers of others, built here from published descriptions, in the form that the comparison and the simulator take.

None is tuned against; where a choice was open, the better one for the method was taken, and methods that plan from
predictions are given the true loads.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.balancers.laer import laer_style
from benchmarks.balancers.llep import llep
from foreroute.plan.hosts import CellPlan
from foreroute.simulate.balancers import Balancer, BalancerInput, HeldExperts, Method
from foreroute.simulate.eplb import eplb_hosts, even_split
from foreroute.simulate.methods import BALANCERS

OTHER_BALANCERS = {
    "laer": Balancer("LAER-style", "micro-step", laer_style),
    "llep": Balancer("LLEP-style", "micro-step", llep, slots="shared"),
}
"""By short name, in the order of tables."""


def baselines(before_MLGE: NDArray[np.integer]) -> dict[str, Balancer]:
    """List what stands beside the planner after a step of these counts: static, EPLB by what it saw, and others."""
    last = Balancer("EPLB by the micro-step before", "previous micro-step", after(before_MLGE[-1].sum(axis=1)))
    return BALANCERS | {"eplb_last": last} | OTHER_BALANCERS


def after(loads_LE: NDArray[np.integer]) -> Method:
    """EPLB for every micro-step by the loads of the one before it, of which the first's are given, integers [L, E]."""

    def method(problem: BalancerInput) -> Iterator[CellPlan]:
        held = HeldExperts(problem)
        seen_LE = loads_LE.astype(np.int64)
        for layer, counts_GE in problem.cells():
            expert_H, rank_H, copies_H = eplb_hosts(seen_LE[layer], problem)
            # placed first, so that this cell's own loads are news to it
            seen_LE[layer] = counts_GE.sum(axis=0)
            yield held.host(layer, expert_H, rank_H, even_split(expert_H, copies_H, counts_GE))

    return method
