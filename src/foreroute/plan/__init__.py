"""The plan of a step as data: topology, options, counts, the plan itself, its file and its checker. No torch."""

from foreroute.plan.checker import verify
from foreroute.plan.counts import load_counts, packed_counts, save_counts, sequence_counts
from foreroute.plan.hosts import CellPlan
from foreroute.plan.options import PlanOptions
from foreroute.plan.plan_file import load_plan, save_plan
from foreroute.plan.received_rows import KnownRows, Reservation, known_rows
from foreroute.plan.step_plan import StepPlan
from foreroute.plan.topology import Links, Topology

__all__ = [
    "CellPlan",
    "KnownRows",
    "Links",
    "PlanOptions",
    "Reservation",
    "StepPlan",
    "Topology",
    "known_rows",
    "load_counts",
    "load_plan",
    "packed_counts",
    "save_counts",
    "save_plan",
    "sequence_counts",
    "verify",
]
