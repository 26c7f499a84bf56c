"""What was decided: the container of routes and other decisions, its checks, file, fingerprint, and counts. No torch.

spec         experts, picks and routed layers of a model       RoutingSpec, RoutedLayer, LayerKind
container    the routes of sequences, and cutting them         RoutingTrace, concatenate
streams      other decisions on the same rows                  DecisionStream, SAMPLING
indexers     what indexers of sparse attention may choose      IndexerSpec, INDEXER
operations   what is done with whole traces                    from_masks, extended, overlap, digest, count_assignments
checks       arrays from outside: dtypes, ranges, offsets
file/        a trace on disk                                   save, load, TraceStore, CODECS
synthetic    made-up routes                                    synthetic_trace
"""

from foreroute.trace.container import NO_VERSION, RoutingTrace, concatenate
from foreroute.trace.file.codec import CODECS, CodecName
from foreroute.trace.file.reading import load
from foreroute.trace.file.store import TraceStore
from foreroute.trace.file.writing import encoded_size, save
from foreroute.trace.indexers import INDEXER, IndexerSpec
from foreroute.trace.operations import (
    RouteOverlap,
    add_assignments,
    count_assignments,
    digest,
    extended,
    from_masks,
    overlap,
    shared_picks,
)
from foreroute.trace.spec import LayerKind, RoutedLayer, RoutingSpec
from foreroute.trace.streams import SAMPLING, DecisionStream
from foreroute.trace.synthetic import synthetic_trace

__all__ = [
    "CODECS",
    "INDEXER",
    "NO_VERSION",
    "SAMPLING",
    "CodecName",
    "DecisionStream",
    "IndexerSpec",
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
    "shared_picks",
    "synthetic_trace",
]
