"""Trace to routers: replayed rows of one forward, the selection they force, and what came of it."""

from foreroute.replay.agreement_sums import AgreementSums, count_experts
from foreroute.replay.arguments import as_version, require_choice, require_kind, require_switch, require_version
from foreroute.replay.notes import Counts, LayerNotes, PassNotes, Watch, id_dtype, required
from foreroute.replay.pass_stack import OneThread, PassStack
from foreroute.replay.rows import MissingRows, ReplayRows, is_faithful, to_device
from foreroute.replay.selection import Forced, forced_selection
from foreroute.replay.session import opened_once, require_effect

__all__ = [
    "AgreementSums",
    "Counts",
    "Forced",
    "LayerNotes",
    "MissingRows",
    "OneThread",
    "PassNotes",
    "PassStack",
    "ReplayRows",
    "Watch",
    "as_version",
    "count_experts",
    "forced_selection",
    "id_dtype",
    "is_faithful",
    "opened_once",
    "require_choice",
    "require_effect",
    "require_kind",
    "require_switch",
    "require_version",
    "required",
    "to_device",
]
