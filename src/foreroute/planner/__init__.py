"""From counts of assignments to the plan of a step: homes, replicas and token splits. No torch."""

from foreroute.planner.plan_step import plan, start
from foreroute.planner.progress import PlanInProgress

__all__ = ["PlanInProgress", "plan", "start"]
