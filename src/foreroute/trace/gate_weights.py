"""Gate weights beside the routes: what a router weighted each picked expert with, where a source has that.

They are kept in memory, row by row with the routes. The file format has no place for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import TraceContentError
from foreroute.trace.check import as_array

if TYPE_CHECKING:
    from foreroute.trace.container import RoutingTrace


def as_gate_weights(values: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Float32 [N, L, K], checked.

    Raises:
        TraceContentError: when they do not belong to such routes, or are not finite.
    """
    given = as_array(values, name="gate_weights")
    if given.dtype.kind not in "fiu":
        raise TraceContentError(f"gate weights are {given.dtype}; expected numbers")
    weights_NLK = np.ascontiguousarray(given, np.float32)
    if weights_NLK.shape != shape:
        raise TraceContentError(f"gate weights have shape {weights_NLK.shape}; expected one per pick, {shape}")
    if not np.isfinite(weights_NLK).all():
        raise TraceContentError("gate weights are not all finite; what computed them has diverged")
    return weights_NLK


def joined_gate_weights(parts: Sequence[RoutingTrace]) -> NDArray[np.float32] | None:
    """Those of traces one after another; None where none has any.

    Raises:
        TraceContentError: when one has them, and another has routes without them.
    """
    if all(part.gate_weights_NLK is None for part in parts):
        return None
    for part in parts:
        if part.gate_weights_NLK is None and part.valid_N.any():
            raise TraceContentError(
                "some of the traces have gate weights and others do not; record all of them with gate weights, or "
                "take them off with without_gate_weights()"
            )
    return np.concatenate([weights_of(part) for part in parts])


def weights_of(trace: RoutingTrace) -> NDArray[np.float32]:
    """Float32 [N, L, K]; zeros for rows that were never routed."""
    if trace.gate_weights_NLK is None:
        return np.zeros(trace.expert_ids_NLK.shape, np.float32)
    return trace.gate_weights_NLK


def in_ascending_order(ids_NLK: NDArray[Any], weights_NLK: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    """The weights in the order of ascending ids."""
    if weights_NLK is None:
        return None
    return np.take_along_axis(weights_NLK, np.argsort(ids_NLK, axis=-1, kind="stable"), axis=-1)
