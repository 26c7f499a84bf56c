"""What a run writes down about each step, and reading it: the metrics, typed. No torch, and nothing is drawn."""

from foreroute.records.runs import Run, read_runs
from foreroute.records.step_record import StepRecord

__all__ = ["Run", "StepRecord", "read_runs"]
