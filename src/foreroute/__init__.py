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

Importing this package loads numpy and nothing heavier; frameworks are loaded by what is asked for by name.
"""

from typing import TYPE_CHECKING, Any

from foreroute import capture, costs, plan, planner
from foreroute.errors import ForerouteError
from foreroute.trace import LayerKind, RoutedLayer, RoutingSpec, RoutingTrace, concatenate, load, save

if TYPE_CHECKING:
    from foreroute.doctor import compare
else:

    def __getattr__(name: str) -> Any:
        """Load `compare` when it is asked for: the doctor stands on most of the package."""
        if name == "compare":
            from foreroute.doctor import compare

            return compare
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "load",
    "plan",
    "planner",
    "save",
]
