"""How far apart trainer and rollout engine are: token probabilities, routes, and the margins between. No torch."""

from foreroute.mismatch.margins import MarginHistogram, margin_histogram
from foreroute.mismatch.routing import RoutingMismatch, routing_mismatch
from foreroute.mismatch.tokens import TokenMismatch, token_mismatch

__all__ = [
    "MarginHistogram",
    "RoutingMismatch",
    "TokenMismatch",
    "margin_histogram",
    "routing_mismatch",
    "token_mismatch",
]
