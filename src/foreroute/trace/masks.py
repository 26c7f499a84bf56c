"""Routes given as binary masks over experts, as some trainers hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import TraceContentError
from foreroute.trace.check import as_array
from foreroute.trace.container import NO_VERSION, RoutingTrace
from foreroute.trace.spec import RoutingSpec


def from_masks(
    spec: RoutingSpec,
    token_ids: Sequence[ArrayLike],
    masks: Sequence[ArrayLike],
    *,
    weight_version: int = NO_VERSION,
    provenance: Mapping[str, str] | None = None,
) -> RoutingTrace:
    """A trace of one mask over experts per token and layer. A mask has no order of picks, and neither has the trace.

    Args:
        spec: the model the routes come from.
        token_ids: S integer arrays [T].
        masks: S arrays [R, L, E] of bools, or zeros and ones, with K ones in every row; R = T, or R < T where the
            last T - R tokens were never routed.
        weight_version: the version of the weights that computed the routes.
        provenance: what made the trace.

    Raises:
        TraceContentError: when a row has not K experts, or shapes disagree.
    """
    ids = [_ids_of(mask, spec, f"masks[{s}]") for s, mask in enumerate(masks)]
    trace = RoutingTrace.from_sequences(spec, token_ids, ids, weight_version=weight_version, provenance=provenance)
    return replace(trace, pick_order_kept=False)


def _ids_of(mask: ArrayLike, spec: RoutingSpec, name: str) -> NDArray[Any]:
    given = as_array(mask, name=name)
    chosen_RLE = given == 1
    if given.ndim != 3 or given.shape[1:] != (spec.num_layers, spec.num_experts):
        raise TraceContentError(
            f"{name} has shape {given.shape}; expected [rows, {spec.num_layers} layers, {spec.num_experts} experts]"
        )
    if not (chosen_RLE | (given == 0)).all():
        raise TraceContentError(f"{name} has values beside 0 and 1; expected a mask, not scores")
    picks_RL = chosen_RLE.sum(axis=-1)
    if (picks_RL != spec.top_k).any():
        row, layer = (int(i) for i in np.argwhere(picks_RL != spec.top_k)[0])
        raise TraceContentError(
            f"{name}, row {row}, {spec.layers[layer]} picks {int(picks_RL[row, layer])} experts; "
            f"expected {spec.top_k}. Rows without a route are left out, at the end of a sequence"
        )
    return np.nonzero(chosen_RLE)[2].reshape(*picks_RL.shape, spec.top_k)
