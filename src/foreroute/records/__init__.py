"""What a run writes down about each step, and what a page reads: the metrics, typed. No torch."""

from foreroute.records.step_record import (
    SIDES,
    DeviceRecord,
    EvaluationRecord,
    ExecutionRecord,
    ImportanceRecord,
    Load,
    MarginsRecord,
    MismatchRecord,
    SamplingRecord,
    Side,
    StageRecord,
    StepRecord,
    parse_step,
)

__all__ = [
    "SIDES",
    "DeviceRecord",
    "EvaluationRecord",
    "ExecutionRecord",
    "ImportanceRecord",
    "Load",
    "MarginsRecord",
    "MismatchRecord",
    "SamplingRecord",
    "Side",
    "StageRecord",
    "StepRecord",
    "parse_step",
]
