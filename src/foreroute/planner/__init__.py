"""From counts of assignments to the plan of a step: homes, replicas and token splits. No torch."""

from foreroute.planner.plan_cell import plan_cell
from foreroute.planner.plan_step import plan, plan_and_why

__all__ = ["plan", "plan_and_why", "plan_cell"]
