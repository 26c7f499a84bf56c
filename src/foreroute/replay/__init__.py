"""Sessions in which the routers of a model are recorded, or forced to the routes of a trace.

It binds traces to `foreroute.core`, and knows torch and no framework. An adapter derives a `RoutedModel`.
"""

from foreroute.replay.arguments import WANTED_MASK, kept_by, not_of_kind, require_version
from foreroute.replay.indexers import IndexerHook, IndexerPass, IndexerRows, Places, require_choices
from foreroute.replay.recording import ForwardRows, RecordedPass, Recording
from foreroute.replay.rows import (
    Counts,
    MissingRows,
    PaddingRows,
    Policy,
    ReplayRows,
    faithful_rows,
    is_faithful,
    refuse_missing,
    to_device,
)
from foreroute.replay.sampling_masks import masked_entropy_of_logits, masked_logprobs, masked_logprobs_of_logits
from foreroute.replay.session import PassRoutes, ReplaySession, RoutedModel, Routes, added_up
from foreroute.replay.telemetry import Telemetry

__all__ = [
    "WANTED_MASK",
    "Counts",
    "ForwardRows",
    "IndexerHook",
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
    "added_up",
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
