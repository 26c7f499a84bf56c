"""Container of routes and other decisions, its checks, file, fingerprint, and counts. No torch.

spec          experts, picks and routed layers of a model      RoutingSpec, RoutedLayer, LayerKind
container     the routes of sequences, and cutting them        RoutingTrace, concatenate, digest
streams       other decisions on the same rows                 DecisionStream, SAMPLING, PIXELS
indexers      what indexers of sparse attention may choose     IndexerSpec, INDEXER
operations    what is done with whole traces                   extended
checks        arrays from outside: dtypes, ranges, offsets
file          a trace on disk, or at a URL                     save, load
parts         a step that several write and many read in part  save_part, load_parts
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foreroute.trace.container import NO_VERSION, RoutingTrace, concatenate, digest
from foreroute.trace.indexers import INDEXER, IndexerSpec
from foreroute.trace.spec import LayerKind, RoutedLayer, RoutingSpec
from foreroute.trace.streams import PIXELS, SAMPLING, DecisionStream

if TYPE_CHECKING:
    from foreroute.trace.file import ENCODINGS, Encoding, load, save
    from foreroute.trace.operations import extended
    from foreroute.trace.parts import load_parts, save_part

__all__ = [
    "ENCODINGS",
    "INDEXER",
    "NO_VERSION",
    "PIXELS",
    "SAMPLING",
    "DecisionStream",
    "Encoding",
    "IndexerSpec",
    "LayerKind",
    "RoutedLayer",
    "RoutingSpec",
    "RoutingTrace",
    "concatenate",
    "digest",
    "extended",
    "load",
    "load_parts",
    "save",
    "save_part",
]

_FILE_OF = dict.fromkeys(("ENCODINGS", "Encoding", "load", "save"), "file")
_FILE_OF |= dict.fromkeys(("load_parts", "save_part"), "parts")
_FILE_OF["extended"] = "operations"


def __getattr__(name: str) -> Any:
    """Load what reads and writes files, and what is done with whole traces, when it is asked for."""
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILE_OF[name]}"), name)
