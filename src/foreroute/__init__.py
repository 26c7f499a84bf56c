"""Record the routes at rollout. Replay them in training. Balance the experts before the step runs.

    import foreroute as fr
    from foreroute.adapters import hf

    routed = hf.attach(model)                 # finds the routers and checks itself
    with routed.record() as recording:
        model(**batch)
    with routed.replay(recording.trace()):    # exact selection, live gates and gradients
        loss = policy_loss(model(**batch))
        loss.backward()

Who has arrays and no trace: `fr.compare(trainer_logprobs, engine_logprobs, mask)`.

Importing this package loads nothing: what is asked for by name is loaded then.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreroute import capture, costs, layout, mismatch, plan, planner, simulate, trace
    from foreroute.doctor import compare
    from foreroute.errors import ForerouteError
    from foreroute.trace import LayerKind, RoutedLayer, RoutingSpec, RoutingTrace, concatenate, load, save

__version__ = "0.1.0"

__all__ = [
    "ForerouteError",
    "LayerKind",
    "RoutedLayer",
    "RoutingSpec",
    "RoutingTrace",
    "__version__",
    "capture",
    "compare",
    "concatenate",
    "costs",
    "layout",
    "load",
    "mismatch",
    "plan",
    "planner",
    "save",
    "simulate",
    "trace",
]

_ROOM_OF = {"ForerouteError": "errors", "compare": "doctor"}
_ROOM_OF |= dict.fromkeys(("LayerKind", "RoutedLayer", "RoutingSpec", "RoutingTrace"), "trace")
_ROOM_OF |= dict.fromkeys(("concatenate", "load", "save"), "trace")


def __getattr__(name: str) -> Any:
    """Load the room that a name is in, or is, when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = import_module(f"foreroute.{_ROOM_OF.get(name, name)}")
    found = globals()[name] = getattr(room, name) if name in _ROOM_OF else room
    return found


def __dir__() -> list[str]:
    """Name what is public, whether it was asked for or not."""
    return sorted(__all__)
