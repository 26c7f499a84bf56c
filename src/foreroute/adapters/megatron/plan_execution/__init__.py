"""Plan execution: every MoE layer of every micro-batch served by homes and replicas, as a plan says."""

from foreroute.adapters.megatron.plan_execution.execution import ExecutionRanks, PlanExecution, whole_counts

__all__ = ["ExecutionRanks", "PlanExecution", "whole_counts"]
