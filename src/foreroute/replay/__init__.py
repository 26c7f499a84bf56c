"""Trace to routers: replayed rows of one forward, the selection they force, and what came of it."""

from foreroute.replay.agreement_sums import AgreementSums, count_experts
from foreroute.replay.effect import require_effect
from foreroute.replay.missing import MissingRows
from foreroute.replay.notes import Counts, LayerNotes, PassNotes, Watch, id_dtype, required
from foreroute.replay.pass_stack import PassStack
from foreroute.replay.rows import ReplayRows
from foreroute.replay.selection import Forced, forced_selection

__all__ = [
    "AgreementSums",
    "Counts",
    "Forced",
    "LayerNotes",
    "MissingRows",
    "PassNotes",
    "PassStack",
    "ReplayRows",
    "Watch",
    "count_experts",
    "forced_selection",
    "id_dtype",
    "require_effect",
    "required",
]
