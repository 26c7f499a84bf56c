"""Mismatch of trainer and rollout engine, and its causes: tokens, routes, margins, the defect. No torch."""

from foreroute.mismatch.attribution import K3Split, Root, RootMismatch, root_mismatch, split_k3
from foreroute.mismatch.defects import Explanation, explain
from foreroute.mismatch.measures import (
    LOG10_EDGES,
    RoutingMismatch,
    TokenMismatch,
    margin_histogram,
    routing_mismatch,
    token_mismatch,
)
from foreroute.mismatch.mixups import Defect
from foreroute.mismatch.sentinel import LooksLike, RootCounts, Sentinel, Suspicion

__all__ = [
    "LOG10_EDGES",
    "Defect",
    "Explanation",
    "K3Split",
    "LooksLike",
    "Root",
    "RootCounts",
    "RootMismatch",
    "RoutingMismatch",
    "Sentinel",
    "Suspicion",
    "TokenMismatch",
    "explain",
    "margin_histogram",
    "root_mismatch",
    "routing_mismatch",
    "split_k3",
    "token_mismatch",
]
