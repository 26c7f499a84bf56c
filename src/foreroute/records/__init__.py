"""What a run writes down about each step, and reading it: the metrics, typed. No torch, and nothing is drawn."""

from foreroute.records.runs import Run, read_run, read_runs
from foreroute.records.step_record import (
    SIDES,
    DeviceRecord,
    ExecutionRecord,
    ImportanceRecord,
    Load,
    MarginsRecord,
    MismatchRecord,
    Side,
    StepRecord,
    parse_step,
    why_invalid,
)

__all__ = [
    "SIDES",
    "DeviceRecord",
    "ExecutionRecord",
    "ImportanceRecord",
    "Load",
    "MarginsRecord",
    "MismatchRecord",
    "Run",
    "Side",
    "StepRecord",
    "parse_step",
    "read_run",
    "read_runs",
    "why_invalid",
]
