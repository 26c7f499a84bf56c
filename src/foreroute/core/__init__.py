"""Replay of expert routes on torch alone: integer tensors in, exact selection, live gates and gradients.

    from foreroute.core import attach

    routed = attach(model)                                   # proves itself, or names the router
    with routed.replay(ids_BTLK, attention_mask):            # -1: not recorded, the router chooses
        loss = model(**batch).loss                           # any checkpointing; backward may run later
    routed.report()                                          # rows replayed, natively differing, of each router

    weights, ids = select_at(logits, ids, gate="sigmoid")    # in a router of your own, without hooks

Nothing but torch is imported, and that when a name is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import AttachError, ForerouteError, ReplayError

if TYPE_CHECKING:
    from .attaching import attach
    from .deferred_checks import DeferredChecks
    from .routed import LayerReport, Routed, TensorRecording
    from .selecting import select_at

_LAZY = {"DeferredChecks": ".deferred_checks", "attach": ".attaching", "select_at": ".selecting"}
_LAZY |= dict.fromkeys(("LayerReport", "Routed", "TensorRecording"), ".routed")

__all__ = [
    "AttachError",
    "DeferredChecks",
    "ForerouteError",
    "LayerReport",
    "ReplayError",
    "Routed",
    "TensorRecording",
    "attach",
    "select_at",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
