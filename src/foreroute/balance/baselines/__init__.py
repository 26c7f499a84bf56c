"""Balancers to compare with: own implementations of published methods, all in one form.

Those named "-style" are built from a description, because there is no public code that could be run here, or because
it does not fit the task as it is. None is tuned against; where a choice was open, the better one for the method was
taken, and methods that plan from predictions are given the true loads where their name says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from foreroute.balance.baselines.eplb import eplb_micro_step, eplb_previous, eplb_step, eplb_step_lp
from foreroute.balance.baselines.fastermoe import fastermoe_style
from foreroute.balance.baselines.feplb import feplb_style
from foreroute.balance.baselines.laer import laer_style
from foreroute.balance.baselines.lplb import lplb_style
from foreroute.balance.baselines.problem import Method, Problem
from foreroute.balance.baselines.relibra import relibra_style
from foreroute.balance.baselines.static import static
from foreroute.balance.options import SlotUse

__all__ = ["BASELINES", "Baseline", "Method", "Problem"]


@dataclass(frozen=True)
class Baseline:
    """A method and what it sees.

    Attributes:
        label: for tables.
        knows: the loads that it plans from: "nothing", "previous step", "step" or "micro-step".
        method: yields an assignment per cell.
        rehomes: whether it places homes anew for the step. Where not, gradients of moved experts return to the homes
            that were there.
        slots: whose the slots are: of each layer, or one set that all layers use, which is empty at every cell.
    """

    label: str
    knows: str
    method: Method
    rehomes: bool = False
    slots: SlotUse = "layer"


BASELINES = {
    "static": Baseline("static", "nothing", static),
    "eplb_previous": Baseline("EPLB, previous step", "previous step", eplb_previous, rehomes=True),
    "eplb_step": Baseline("EPLB, this step", "step", eplb_step, rehomes=True),
    "eplb_step_lp": Baseline("EPLB, this step + LP split", "micro-step", eplb_step_lp, rehomes=True),
    "eplb_micro_step": Baseline("EPLB, per micro-step", "micro-step", eplb_micro_step),
    "lplb": Baseline("LPLB-style", "micro-step", lplb_style, rehomes=True),
    "fastermoe": Baseline("FasterMoE-style", "micro-step", fastermoe_style),
    "laer": Baseline("LAER-style", "micro-step", laer_style),
    "feplb": Baseline("FEPLB-style", "micro-step", feplb_style, slots="shared"),
    "relibra": Baseline("ReLibra-style", "micro-step", relibra_style, rehomes=True, slots="shared"),
}
"""By short name, in the order of tables."""
