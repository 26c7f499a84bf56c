"""What was routed: the container of routes, its checks, its file, its fingerprint, and counts. No torch."""

from foreroute.trace.assembly import extended
from foreroute.trace.codec import CODECS, CodecName
from foreroute.trace.container import NO_VERSION, RoutingTrace, concatenate
from foreroute.trace.counts import add_assignments, count_assignments
from foreroute.trace.digest import digest
from foreroute.trace.file import encoded_size, load, save
from foreroute.trace.masks import from_masks
from foreroute.trace.overlap import RouteOverlap, overlap
from foreroute.trace.spec import LayerKind, RoutedLayer, RoutingSpec
from foreroute.trace.store import TraceStore
from foreroute.trace.synthetic import synthetic_trace

__all__ = [
    "CODECS",
    "NO_VERSION",
    "CodecName",
    "LayerKind",
    "RouteOverlap",
    "RoutedLayer",
    "RoutingSpec",
    "RoutingTrace",
    "TraceStore",
    "add_assignments",
    "concatenate",
    "count_assignments",
    "digest",
    "encoded_size",
    "extended",
    "from_masks",
    "load",
    "overlap",
    "save",
    "synthetic_trace",
]
