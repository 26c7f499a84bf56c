"""What a run writes down about each step, and reading it: the metrics, typed. No torch, and nothing is drawn."""

from foreroute.records.json_form import to_json
from foreroute.records.runs import Run, parse_step, read_run, read_runs
from foreroute.records.step_record import (
    SIDES,
    DeviceRecord,
    EvaluationRecord,
    ExecutionRecord,
    ImportanceRecord,
    Load,
    MismatchRecord,
    NumRanks,
    SamplingRecord,
    Side,
    StageRecord,
    StepRecord,
)

__all__ = [
    "SIDES",
    "DeviceRecord",
    "EvaluationRecord",
    "ExecutionRecord",
    "ImportanceRecord",
    "Load",
    "MismatchRecord",
    "NumRanks",
    "Run",
    "SamplingRecord",
    "Side",
    "StageRecord",
    "StepRecord",
    "parse_step",
    "read_run",
    "read_runs",
    "to_json",
]
