"""Sessions in which the routers of a model are recorded, or forced to the routes of a trace.

It binds traces to `foreroute.core`, and knows torch and no framework. An adapter derives a `RoutedModel`. A name loads
the file that it is in.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreroute.core.passes import ReplayCounts
    from foreroute.replay.counting import RootRows, Telemetry
    from foreroute.replay.indexers import IndexerPass
    from foreroute.replay.recording import ForwardRows, RecordedPass, Recording
    from foreroute.replay.rows import PlacedRows, Policy, ReplayRows, TraceOnDevice
    from foreroute.replay.sampling_masks import masked_logprobs, masked_logprobs_of_logits
    from foreroute.replay.session import ReplaySession, RoutedModel, Routes

__all__ = [
    "ForwardRows",
    "IndexerPass",
    "PlacedRows",
    "Policy",
    "RecordedPass",
    "Recording",
    "ReplayCounts",
    "ReplayRows",
    "ReplaySession",
    "RootRows",
    "RoutedModel",
    "Routes",
    "Telemetry",
    "TraceOnDevice",
    "masked_logprobs",
    "masked_logprobs_of_logits",
]

_FILE_OF = {"IndexerPass": ".indexers", "ReplayCounts": "foreroute.core.passes"}
_FILE_OF |= dict.fromkeys(("RootRows", "Telemetry"), ".counting")
_FILE_OF |= dict.fromkeys(("ForwardRows", "RecordedPass", "Recording"), ".recording")
_FILE_OF |= dict.fromkeys(("ReplaySession", "RoutedModel", "Routes"), ".session")
_FILE_OF |= dict.fromkeys(("masked_logprobs", "masked_logprobs_of_logits"), ".sampling_masks")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FILE_OF.get(name, ".rows"), __name__), name)
