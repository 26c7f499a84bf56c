"""How far apart trainer and rollout engine are, and why: tokens, routes, margins, the defect, alarms. No torch."""

from foreroute.mismatch.alarm_rules import Alarm, Kind, Signals, alarms
from foreroute.mismatch.decisions import StreamDifference, misplaced_masks, stream_difference
from foreroute.mismatch.defects import Explanation, explain
from foreroute.mismatch.measures import (
    LOG10_EDGES,
    LiveAgreement,
    RoutingMismatch,
    TokenMismatch,
    as_traces,
    margin_histogram,
    routing_mismatch,
    token_mismatch,
)
from foreroute.mismatch.mixups import Defect

__all__ = [
    "LOG10_EDGES",
    "Alarm",
    "Defect",
    "Explanation",
    "Kind",
    "LiveAgreement",
    "RoutingMismatch",
    "Signals",
    "StreamDifference",
    "TokenMismatch",
    "alarms",
    "as_traces",
    "explain",
    "margin_histogram",
    "misplaced_masks",
    "routing_mismatch",
    "stream_difference",
    "token_mismatch",
]
