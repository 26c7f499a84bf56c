"""How far apart trainer and rollout engine are, and why: tokens, routes, margins, the defect, alarms. No torch."""

from foreroute.mismatch.alarm_rules import Alarm, Signals, alarms
from foreroute.mismatch.defects import Explanation, explain
from foreroute.mismatch.measures import (
    LOG10_EDGES,
    LiveAgreement,
    RoutingMismatch,
    TokenMismatch,
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
    "LiveAgreement",
    "RoutingMismatch",
    "Signals",
    "TokenMismatch",
    "alarms",
    "explain",
    "margin_histogram",
    "routing_mismatch",
    "token_mismatch",
]
