"""Captures that look like one that failed in silence: every id is possible, and together they cannot be true."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import CaptureError, shown
from foreroute.trace import RoutingSpec, RoutingTrace

MIN_ROWS = 32
"""Rows before a layer that never changes its mind counts as a failed capture. Chosen by hand: a short prompt of a
trained model may well go to one set of experts in its first layer."""
MIN_TOKENS = 8
"""Distinct input tokens among them: a repeated token may well go to the same experts."""
ROWS_AT_ONCE = 256


def refuse_unfilled_layers(rows_RLK: NDArray[Any], spec: RoutingSpec, *, what: str) -> None:
    """Raise `CaptureError` when a layer of a sequence has nothing but zeros: its buffer was never filled.

    Args:
        rows_RLK: [R, L, K], the routed rows of one sequence.
        spec: E and the layer table.
        what: names the sequence.
    """
    if not len(rows_RLK):
        return
    zero_L = ~rows_RLK.any(axis=(0, 2))
    # With one pick, zeros are a possible route to expert 0; a capture full of them is not.
    if (spec.top_k > 1 and zero_L.any()) or (
        zero_L.all() and zero_L.size * len(rows_RLK) >= 8 and spec.num_experts > 1
    ):
        wrong_table = (
            "" if zero_L.all() else ". If the layer is dense, the model's layers are stated wrong: pass its own"
        )
        raise CaptureError(
            f"{what} has nothing but zeros in {int(zero_L.sum())} of {spec.num_layers} layers (first: "
            f"{spec.layers[int(np.argmax(zero_L))]}); the engine never filled them. Compiled or fused MoE "
            f"paths bypass the capture: try enforce_eager=True, another MoE kernel, or a newer engine{wrong_table}"
        )


def refuse_routed_dense(columns_RDK: NDArray[Any], layers: list[int], *, what: str) -> None:
    """Raise `CaptureError` when the column of a dense layer varies: then the layer axis is not the model's.

    Args:
        columns_RDK: [R, D, K], the columns of D layers without a router, which engines leave at one constant.
        layers: their numbers.
        what: names the sequence.
    """
    if not columns_RDK.size:
        return
    varies_D = (columns_RDK != columns_RDK[:1, :, :1]).any(axis=(0, 2))
    if varies_D.any():
        raise CaptureError(
            f"{what} has routes in decoder layer {layers[int(np.argmax(varies_D))]}, which the spec says is dense. The "
            "layer axis is shifted, a draft or MTP layer poses as a decoder layer (switch off its capture, or upgrade "
            "the engine: vLLM 0.26, SGLang 0.5.15), or the engine runs another model (SGLang ignores mlp_only_layers "
            "of Qwen MoE)"
        )


def refuse_constant_layers(trace: RoutingTrace) -> None:
    """Raise `CaptureError` when a layer sends many different tokens to the same experts."""
    if not isinstance(trace, RoutingTrace):
        raise CaptureError(f"the trace is {shown(trace)}; expected a RoutingTrace")
    spec, valid = trace.spec, trace.valid_N
    chooses = [layer for layer, (num_experts, top_k) in enumerate(spec.sizes_L) if top_k < num_experts]
    if not chooses or valid.sum() < MIN_ROWS:
        return
    if len(np.unique(trace.token_ids_N[valid])) < MIN_TOKENS:
        return
    ids = trace.expert_ids_NLK[valid]
    layers, first_LK = np.array(chooses), np.sort(ids[0], axis=-1)
    # In parts: after the first, hardly a layer is left to sort.
    for start in range(0, len(ids), ROWS_AT_ONCE):
        part = np.sort(ids[start : start + ROWS_AT_ONCE, layers], axis=-1)
        layers = layers[(part == first_LK[layers]).all(axis=(0, 2))]
    if len(layers):
        raise CaptureError(
            f"{spec.layers[int(layers[0])]} sends all {len(ids)} rows to experts {first_LK[layers[0]].tolist()} "
            f"({len(layers)} such layers); the capture of that layer failed. If its router really has collapsed, build "
            "the trace with RoutingTrace.from_rows"
        )
