"""Balancers of others, built here from published descriptions, in the form that the comparison and the simulator take.

None is tuned against; where a choice was open, the better one for the method was taken, and methods that plan from
predictions are given the true loads.
"""

from __future__ import annotations

from benchmarks.balancers.laer import laer_style
from benchmarks.balancers.llep import llep
from foreroute.simulate.balancers import Balancer

OTHER_BALANCERS = {
    "laer": Balancer("LAER-style", "micro-step", laer_style),
    "llep": Balancer("LLEP-style", "micro-step", llep, slots="shared"),
}
"""By short name, in the order of tables."""
