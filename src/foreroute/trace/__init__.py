"""What was routed: the container of routes, its checks, its file, its fingerprint, and counts. No torch."""

from foreroute.trace.assembly import extended
from foreroute.trace.container import NO_VERSION, RoutingTrace, concatenate
from foreroute.trace.counts import count_assignments
from foreroute.trace.digest import digest
from foreroute.trace.file import load, save, write_atomically
from foreroute.trace.overlap import RouteOverlap, overlap
from foreroute.trace.spec import LayerKind, RoutedLayer, RoutingSpec

__all__ = [
    "NO_VERSION",
    "LayerKind",
    "RouteOverlap",
    "RoutedLayer",
    "RoutingSpec",
    "RoutingTrace",
    "concatenate",
    "count_assignments",
    "digest",
    "extended",
    "load",
    "overlap",
    "save",
    "write_atomically",
]
