"""From counts of assignments to the plan of a step: homes, replicas and token splits of experts. No torch."""

from foreroute.balance.assignment import Assignment
from foreroute.balance.costs import CostModel
from foreroute.balance.counts import packed_counts
from foreroute.balance.counts_file import load_counts
from foreroute.balance.load import contiguous_imbalance
from foreroute.balance.options import PlanOptions
from foreroute.balance.packing import Packing, pack_sequences
from foreroute.balance.plan_file import load_plan, save_plan
from foreroute.balance.planner import plan, start
from foreroute.balance.presets import hardware_preset, model_preset
from foreroute.balance.progress import PlanInProgress
from foreroute.balance.step_plan import CellPlan, StepPlan
from foreroute.balance.topology import Links, Topology
from foreroute.balance.verify import verify

__all__ = [
    "Assignment",
    "CellPlan",
    "CostModel",
    "Links",
    "Packing",
    "PlanInProgress",
    "PlanOptions",
    "StepPlan",
    "Topology",
    "contiguous_imbalance",
    "hardware_preset",
    "load_counts",
    "load_plan",
    "model_preset",
    "pack_sequences",
    "packed_counts",
    "plan",
    "save_plan",
    "start",
    "verify",
]
