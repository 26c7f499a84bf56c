"""Balancers to compare with: own implementations of published methods, all in one form.

Those named "-style" are built from a description, because there is no public code that could be run here, or because
it does not fit the task as it is. None is tuned against; where a choice was open, the better one for the method was
taken, and methods that plan from predictions are given the true loads where their name says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from foreroute.plan.options import SlotUse
from foreroute.planner.balancers.eplb import eplb_micro_step, eplb_previous, eplb_step, eplb_step_lp, lplb_style
from foreroute.planner.balancers.laer import laer_style
from foreroute.planner.balancers.lending import fastermoe_style, feplb_style
from foreroute.planner.balancers.problem import BalancerInput, Method, static
from foreroute.planner.balancers.relibra import relibra_style

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
    "eplb_step_lp": Balancer("EPLB, this step + LP split", "micro-step", eplb_step_lp, rehomes=True),
    "eplb_micro_step": Balancer("EPLB, per micro-step", "micro-step", eplb_micro_step),
    "lplb": Balancer("LPLB-style", "micro-step", lplb_style, rehomes=True),
    "fastermoe": Balancer("FasterMoE-style", "micro-step", fastermoe_style),
    "laer": Balancer("LAER-style", "micro-step", laer_style),
    "feplb": Balancer("FEPLB-style", "micro-step", feplb_style, slots="shared"),
    "relibra": Balancer("ReLibra-style", "micro-step", relibra_style, rehomes=True, slots="shared"),
}
"""By short name, in the order of tables."""
