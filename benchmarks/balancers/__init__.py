"""Balancers of others, built here from published descriptions, in the form that the comparison and the simulator take.

None is tuned against; where a choice was open, the better one for the method was taken, and methods that plan from
predictions are given the true loads.
"""

from __future__ import annotations

from benchmarks.balancers.laer import laer_style
from benchmarks.balancers.lending import fastermoe_style, feplb_style
from benchmarks.balancers.llep import llep
from benchmarks.balancers.lplb import eplb_step_lp, lplb_style
from benchmarks.balancers.relibra import relibra_style
from foreroute.simulate.balancers import Balancer

OTHER_BALANCERS = {
    "eplb_step_lp": Balancer("EPLB, this step + LP split", "micro-step", eplb_step_lp),
    "lplb": Balancer("LPLB-style", "micro-step", lplb_style),
    "fastermoe": Balancer("FasterMoE-style", "micro-step", fastermoe_style),
    "laer": Balancer("LAER-style", "micro-step", laer_style),
    "feplb": Balancer("FEPLB-style", "micro-step", feplb_style, slots="shared"),
    "llep": Balancer("LLEP-style", "micro-step", llep, slots="shared"),
    "relibra": Balancer("ReLibra-style", "micro-step", relibra_style, slots="shared"),
}
"""By short name, in the order of tables."""
