"""How far apart trainer and rollout engine are, and why: tokens, routes, margins, the defect, alarms. No torch."""

from foreroute.mismatch.agreement import LOG10_EDGES, LiveAgreement, MarginHistogram, margin_histogram
from foreroute.mismatch.alarms import Alarm, AlarmRules, Kind, Signals, alarms, trouble_began
from foreroute.mismatch.explain import Defect, Explanation, explain
from foreroute.mismatch.routing import RoutingMismatch, routing_mismatch
from foreroute.mismatch.tokens import TokenMismatch, token_mismatch

__all__ = [
    "LOG10_EDGES",
    "Alarm",
    "AlarmRules",
    "Defect",
    "Explanation",
    "Kind",
    "LiveAgreement",
    "MarginHistogram",
    "RoutingMismatch",
    "Signals",
    "TokenMismatch",
    "alarms",
    "explain",
    "margin_histogram",
    "routing_mismatch",
    "token_mismatch",
    "trouble_began",
]
