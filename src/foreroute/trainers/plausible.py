"""Routes beside those that a trainer takes by itself at the same weights: a mix-up on the way is named."""

from __future__ import annotations

import warnings

from foreroute.errors import ReplayError
from foreroute.mismatch import Defect, explain
from foreroute.trace import RoutingTrace

DRIFT = (Defect.WEIGHT_VERSION, Defect.UNEXPLAINED)


def require_same_origin(own: RoutingTrace, rollout: RoutingTrace) -> None:
    """Warn of routes that are far apart, and refuse those that a mix-up explains.

    Args:
        own: of the trainer.
        rollout: of the same tokens.

    Raises:
        ReplayError: naming the mix-up: other positions, sequences or layers, or physical ids.
    """
    found = explain(own, rollout, names=("the trainer's own trace", "the rollout's trace"))
    if found.kind in DRIFT:
        warnings.warn(f"the first rollout's routes are far from the trainer's own: {found.sentence}", stacklevel=2)
    elif found.kind is not Defect.NONE:
        raise ReplayError(f"the first rollout's routes are not those of its tokens ({found.kind}). {found.sentence}")
