"""What every trainer is checked for: the methods that replay stands on, and the routes of the first rollout."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import numpy as np
import torch

from foreroute.adapters.versions import PEERS
from foreroute.errors import AttachError, ReplayError
from foreroute.mismatch import Defect, explain
from foreroute.replay import RoutedModel
from foreroute.trace import RoutingTrace

DRIFT = (Defect.WEIGHT_VERSION, Defect.UNEXPLAINED)
"""What rounding and other weights may look like; anything else is a mix-up on the way."""


def require_api(
    name: str,
    peer: ModuleType,
    owner: type,
    methods: Mapping[str, Sequence[str]],
    *,
    config: type | None = None,
    fields: Sequence[str] = (),
) -> None:
    """Look whether the release of a peer at hand has what its adapter overrides, calls and reads.

    Args:
        name: of the peer, as its documentation spells it.
        peer: its module.
        owner: the class whose methods are overridden.
        methods: by name, the parameters that are passed or read, by name or place.
        config: a dataclass of its configuration.
        fields: what is read of that.

    Raises:
        AttachError: naming the first thing that is missing.
    """
    lacks = [what for method, wanted in methods.items() if (what := _lacking(owner, method, wanted))]
    if config is not None:
        known = getattr(config, "__dataclass_fields__", {})
        lacks += [f"{config.__name__} without {field}" for field in fields if field not in known]
    if lacks:
        raise AttachError(
            f"{name} {getattr(peer, '__version__', '')} has {lacks[0]}, which routing replay stands on; this foreroute "
            f"was tested with {name} {PEERS[name.lower()].newest}. Install that, or a newer foreroute"
        )


def check_first_rollout(routed: RoutedModel, rollout: RoutingTrace, forward: Callable[[], object]) -> None:
    """Hold the routes of a rollout against those that the policy takes by itself at the same weights.

    Routes that stand at other positions, in other sequences or layers, or are physical ids, are seen here. Once they
    are replayed, they look right. Routes that are only far apart are warned of.

    Args:
        routed: the policy, with the weights of the rollout.
        rollout: its routes.
        forward: runs the policy once on the same tokens, with or without sequences of padding after them.

    Raises:
        ReplayError: naming the mix-up that explains a difference.
    """
    with (
        torch.no_grad(),
        torch.random.fork_rng(range(torch.cuda.device_count())),
        warnings.catch_warnings(),
        routed.record() as recording,
    ):
        # what torch says of reentrant checkpointing without gradients
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        forward()
    own = recording.trace().select(np.arange(len(rollout)))
    found = explain(own, rollout, names=("the trainer's own trace", "the rollout's trace"))
    if found.kind in DRIFT:
        warnings.warn(f"the first rollout's routes are far from the trainer's own: {found.sentence}", stacklevel=2)
    elif found.kind is not Defect.NONE:
        raise ReplayError(f"the first rollout's routes are not those of its tokens ({found.kind}). {found.sentence}")


def _lacking(owner: type, name: str, wanted: Sequence[str]) -> str | None:
    method = getattr(owner, name, None)
    if method is None:
        return f"no {owner.__name__}.{name}"
    missing = [parameter for parameter in wanted if parameter not in inspect.signature(method).parameters]
    return f"{owner.__name__}.{name} without {', '.join(missing)}" if missing else None
