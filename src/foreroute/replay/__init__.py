"""Sessions in which the routers of a model are recorded, or forced to the routes of a trace.

It binds traces to `foreroute.core`, and knows torch and no framework. An adapter derives a `RoutedModel`. A name loads
the file that it is in.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreroute.replay.arguments import WANTED_MASK, kept_by, not_of_kind, require_version
    from foreroute.replay.indexers import IndexerPass, IndexerRows, Places, require_choices
    from foreroute.replay.recording import ForwardRows, RecordedPass, Recording
    from foreroute.replay.rows import (
        Counts,
        MissingRows,
        PaddingRows,
        Policy,
        ReplayRows,
        TraceOnDevice,
        faithful_rows,
        is_faithful,
        refuse_missing,
        to_device,
    )
    from foreroute.replay.sampling_masks import (
        masked_entropy_of_logits,
        masked_logprobs,
        masked_logprobs_of_logits,
    )
    from foreroute.replay.session import PassRoutes, ReplaySession, RoutedModel, Routes, WithTelemetry
    from foreroute.replay.telemetry import Telemetry

__all__ = [
    "WANTED_MASK",
    "Counts",
    "ForwardRows",
    "IndexerPass",
    "IndexerRows",
    "MissingRows",
    "PaddingRows",
    "PassRoutes",
    "Places",
    "Policy",
    "RecordedPass",
    "Recording",
    "ReplayRows",
    "ReplaySession",
    "RoutedModel",
    "Routes",
    "Telemetry",
    "TraceOnDevice",
    "WithTelemetry",
    "faithful_rows",
    "is_faithful",
    "kept_by",
    "masked_entropy_of_logits",
    "masked_logprobs",
    "masked_logprobs_of_logits",
    "not_of_kind",
    "refuse_missing",
    "require_choices",
    "require_version",
    "to_device",
]

_FILE_OF = dict.fromkeys(("WANTED_MASK", "kept_by", "not_of_kind", "require_version"), "arguments")
_FILE_OF |= dict.fromkeys(("IndexerPass", "IndexerRows", "Places", "require_choices"), "indexers")
_FILE_OF |= dict.fromkeys(("ForwardRows", "RecordedPass", "Recording"), "recording")
_FILE_OF |= dict.fromkeys(("PassRoutes", "ReplaySession", "RoutedModel", "Routes", "WithTelemetry"), "session")
_FILE_OF |= dict.fromkeys((name for name in __all__ if name.startswith("masked_")), "sampling_masks")
_FILE_OF["Telemetry"] = "telemetry"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILE_OF.get(name, 'rows')}"), name)
