"""Balancers to compare with, in one form: homes alone, and EPLB, equal to the published algorithm.

Balancers of others have the same form and are passed in; `benchmarks/balancers` has some.
"""

from __future__ import annotations

from dataclasses import dataclass

from foreroute.plan.options import SlotUse
from foreroute.planner.balancers.eplb import eplb_micro_step, eplb_previous, eplb_step
from foreroute.planner.balancers.problem import BalancerInput, Method, static

__all__ = ["BALANCERS", "Balancer", "BalancerInput", "Method"]


@dataclass(frozen=True)
class Balancer:
    """A method and what it sees.

    Attributes:
        label: for tables.
        knows: the loads that it plans from: "nothing", "previous step", "step" or "micro-step".
        method: yields the hosts of each cell.
        rehomes: whether it places homes anew for the step. Where not, gradients of moved experts return to the homes
            that were there.
        slots: whose the slots are: of each layer, or one set that all layers use, which is empty at every cell.
    """

    label: str
    knows: str
    method: Method
    rehomes: bool = False
    slots: SlotUse = "layer"


BALANCERS = {
    "static": Balancer("static", "nothing", static),
    "eplb_previous": Balancer("EPLB, previous step", "previous step", eplb_previous, rehomes=True),
    "eplb_step": Balancer("EPLB, this step", "step", eplb_step, rehomes=True),
    "eplb_micro_step": Balancer("EPLB, per micro-step", "micro-step", eplb_micro_step),
}
"""By short name, in the order of tables."""
