"""How far apart trainer and rollout engine are, and why: probabilities, routes, margins, and the defect. No torch."""

from foreroute.mismatch.explain import Defect, Explanation, explain
from foreroute.mismatch.margins import MarginHistogram, margin_histogram
from foreroute.mismatch.routing import RoutingMismatch, routing_mismatch
from foreroute.mismatch.tokens import TokenMismatch, token_mismatch

__all__ = [
    "Defect",
    "Explanation",
    "MarginHistogram",
    "RoutingMismatch",
    "TokenMismatch",
    "explain",
    "margin_histogram",
    "routing_mismatch",
    "token_mismatch",
]
