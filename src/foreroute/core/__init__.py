"""Replay of expert routes on torch alone: integer tensors in, exact selection, live gates and gradients.

    from foreroute.core import attach

    routed = attach(model)                                   # proves itself, or names the router
    with routed.replay(ids_BTLK, attention_mask):            # -1: not recorded, the router chooses
        loss = model(**batch).loss                           # any checkpointing; backward may run later
    routed.report()                                          # rows replayed, natively differing, of each router

Nothing but torch is imported, and that when a name is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import AttachError, ForerouteError, ReplayError

if TYPE_CHECKING:
    from .attaching import attach
    from .routed import LayerReport, Routed, TensorRecording

_LAZY = {"attach": ".attaching"} | dict.fromkeys(("LayerReport", "Routed", "TensorRecording"), ".routed")

__all__ = ["AttachError", "ForerouteError", "LayerReport", "ReplayError", "Routed", "TensorRecording", "attach"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)
