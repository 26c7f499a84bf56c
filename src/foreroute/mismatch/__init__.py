"""How far apart trainer and rollout engine are, and why: probabilities, routes, margins, and the defect. No torch."""

from foreroute.mismatch.agreement import LiveAgreement
from foreroute.mismatch.explain import Defect, Explanation, explain
from foreroute.mismatch.margins import LOG10_EDGES, MarginHistogram, margin_histogram
from foreroute.mismatch.routing import RoutingMismatch, routing_mismatch
from foreroute.mismatch.tokens import TokenMismatch, token_mismatch

__all__ = [
    "LOG10_EDGES",
    "Defect",
    "Explanation",
    "LiveAgreement",
    "MarginHistogram",
    "RoutingMismatch",
    "TokenMismatch",
    "explain",
    "margin_histogram",
    "routing_mismatch",
    "token_mismatch",
]
