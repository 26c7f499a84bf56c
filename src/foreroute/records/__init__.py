"""Records of each step of a run, their reader, and alarms over them: the metrics, typed. No torch, no drawing."""

from foreroute.records.alarm_rules import alarms
from foreroute.records.runs import Run, read_runs
from foreroute.records.step_record import Alarm, StepRecord

__all__ = ["Alarm", "Run", "StepRecord", "alarms", "read_runs"]
