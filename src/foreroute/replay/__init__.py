"""The heart: sessions in which the routers of a model are recorded, or forced to the routes of a trace.

It knows torch and no framework. An adapter derives a `RoutedModel` and its `ModelHooks`.
"""

from foreroute.replay.arguments import WANTED_MASK, kept_by, not_of_kind, require_version
from foreroute.replay.hooks import (
    ModelHooks,
)
from foreroute.replay.indexers import IndexerPass, IndexerRows, Places, require_choices
from foreroute.replay.passes import (
    IndexerHook,
    Listener,
    Pass,
    PassInput,
    RouterHook,
    SelectionHook,
    require_each_once,
)
from foreroute.replay.recording import ForwardRows, RecordedPass, Recording
from foreroute.replay.rows import (
    Counts,
    MissingRows,
    PaddingRows,
    Policy,
    ReplayRows,
    is_faithful,
    refuse_missing,
    to_device,
)
from foreroute.replay.sampling_masks import masked_entropy_of_logits, masked_logprobs, masked_logprobs_of_logits
from foreroute.replay.selection import (
    Forced,
    LayerObservation,
    LayerPass,
    PassObservation,
    Watch,
    forced_selection,
    id_dtype,
)
from foreroute.replay.session import PassRoutes, ReplaySession, RoutedModel, Routes, added_up
from foreroute.replay.telemetry import Telemetry

__all__ = [
    "WANTED_MASK",
    "Counts",
    "Forced",
    "ForwardRows",
    "IndexerHook",
    "IndexerPass",
    "IndexerRows",
    "LayerObservation",
    "LayerPass",
    "Listener",
    "MissingRows",
    "ModelHooks",
    "PaddingRows",
    "Pass",
    "PassInput",
    "PassObservation",
    "PassRoutes",
    "Places",
    "Policy",
    "RecordedPass",
    "Recording",
    "ReplayRows",
    "ReplaySession",
    "RoutedModel",
    "RouterHook",
    "Routes",
    "SelectionHook",
    "Telemetry",
    "Watch",
    "added_up",
    "forced_selection",
    "id_dtype",
    "is_faithful",
    "kept_by",
    "masked_entropy_of_logits",
    "masked_logprobs",
    "masked_logprobs_of_logits",
    "not_of_kind",
    "refuse_missing",
    "require_choices",
    "require_each_once",
    "require_version",
    "to_device",
]
