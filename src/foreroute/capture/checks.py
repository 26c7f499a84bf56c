"""Captures that cannot be true, or that look like a capture that failed in silence."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.recognition import shown
from foreroute.errors import CaptureError
from foreroute.trace import RoutingSpec, RoutingTrace

MIN_ROWS = 32
"""Rows before a layer that never changes its mind counts as a failed capture."""
MIN_TOKENS = 8
"""Distinct input tokens among them: a repeated token may well go to the same experts."""
ROWS_AT_ONCE = 4096


def refuse_false_rows(
    rows_RLK: NDArray[Any], present_R: NDArray[np.bool_], spec: RoutingSpec, *, what: str, first_position: int
) -> None:
    """Raise `CaptureError` unless every present row holds K distinct ids from 0 to E - 1.

    Args:
        rows_RLK: [R, L, K], the routed layers of consecutive rows.
        present_R: bool [R], False where the form marks a row as never routed.
        spec: E and the layer table.
        what: names the sequence.
        first_position: the position of the first row, for the message.
    """
    if not present_R.any():
        return
    _refuse_zero_layers(rows_RLK[present_R], spec, what)
    present = present_R[:, None]
    low, high = (rows_RLK < 0).any(axis=-1) & present, (rows_RLK >= spec.num_experts).any(axis=-1) & present
    expected = f"expected 0 to {spec.num_experts - 1}"
    if low.any():
        raise CaptureError(
            f"{what}, {_first(low, rows_RLK, spec, first_position)}; {expected}. This form marks no missing "
            "rows, or marks some layers of the row only: the capture of that layer failed"
        )
    if high.any():
        raise CaptureError(
            f"{what}, {_first(high, rows_RLK, spec, first_position)}; {expected}. Ids beyond the experts are "
            "physical slots of an expert-parallel load balancer: switch it off or upgrade the engine"
        )
    ordered = np.sort(rows_RLK, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1) & present
    if twice.any():
        raise CaptureError(
            f"{what}, {_first(twice, rows_RLK, spec, first_position)}, an expert twice ({int(twice.sum())} of "
            f"{twice.size} routers); a top-{spec.top_k} row has distinct experts. The buffer was not filled, or its "
            "bytes are read with the wrong shape or dtype"
        )


def routed_before_zeros(rows_RLK: NDArray[Any], *, what: str, first_position: int) -> NDArray[np.bool_]:
    """Say which rows were routed, in a form that fills what was not with zeros: bool [R], False at the end alone.

    Args:
        rows_RLK: [R, L, K], the routed layers of consecutive rows, without the one of the last token.
        what: names the sequence.
        first_position: the position of the first row, for the message.

    Raises:
        CaptureError: when a row of zeros stands before a routed one, where no framework writes it; and for any, when
            K is 1.
    """
    routed: NDArray[np.bool_] = (rows_RLK != 0).any(axis=(1, 2))
    gap = int(np.argmin(routed)) if len(routed) and not routed.all() else None
    if gap is None:
        return routed
    if rows_RLK.shape[2] == 1:
        raise CaptureError(
            f"{what} has a row of zeros at position {first_position + gap}, which in this form means 'never routed', "
            "but with top-1 routing it may as well be expert 0; decode the engine's own output instead"
        )
    if routed[gap:].any():
        raise CaptureError(
            f"{what} has zeros and so no route at position {first_position + gap}, and one at position "
            f"{first_position + gap + int(np.argmax(routed[gap:]))}; expected zeros only at the end. The engine lost "
            "those rows, or they belong to another sequence"
        )
    return routed


def refuse_routed_dense(columns_RDK: NDArray[Any], layers: list[int], *, what: str) -> None:
    """Raise `CaptureError` when a column of a dense layer holds routes: then the layer axis is shifted."""
    if not columns_RDK.size:
        return
    varies = (columns_RDK != columns_RDK[:1, :, :1]).any(axis=(0, 2))
    if varies.any():
        raise CaptureError(
            f"{what} has routes in decoder layer {layers[int(np.argmax(varies))]}, which the spec says is dense. "
            "The layer axis is shifted, or the engine runs another model (SGLang ignores mlp_only_layers of Qwen MoE)"
        )


def refuse_constant_layers(trace: RoutingTrace) -> None:
    """Raise `CaptureError` when a layer sends many different tokens to the same experts."""
    if not isinstance(trace, RoutingTrace):
        raise CaptureError(f"the trace is {shown(trace)}; expected a RoutingTrace")
    spec, valid = trace.spec, trace.valid_N
    if spec.top_k == spec.num_experts or valid.sum() < MIN_ROWS:
        return
    if len(np.unique(trace.token_ids_N[valid])) < MIN_TOKENS:
        return
    ids = trace.expert_ids_NLK[valid]
    alike_L, first_L = np.ones(spec.num_layers, np.bool_), ids[0].sum(axis=-1, dtype=np.int64)
    for start in range(0, len(ids), ROWS_AT_ONCE):  # sums take up to eight times the memory of the ids
        sums = ids[start : start + ROWS_AT_ONCE].sum(axis=-1, dtype=np.int64)
        alike_L &= (sums == first_L).all(axis=0)
    alike = np.flatnonzero(alike_L)  # spares sorting the layers that cannot be constant
    sets = np.sort(ids[:, alike], axis=-1)
    constant = (sets == sets[:1]).all(axis=(0, 2))
    if constant.any():
        first = int(np.argmax(constant))
        raise CaptureError(
            f"{spec.layers[int(alike[first])]} sends all {len(ids)} rows to experts {sets[0, first].tolist()} "
            f"({int(constant.sum())} such layers); the capture of that layer failed. If its router really "
            "has collapsed, build the trace with RoutingTrace.from_rows"
        )


def _refuse_zero_layers(rows_RLK: NDArray[Any], spec: RoutingSpec, what: str) -> None:
    zero = (rows_RLK == 0).all(axis=(0, 2))
    # One pick of expert 0 is a possible route; a capture full of it is not.
    if (spec.top_k > 1 and zero.any()) or (zero.all() and zero.size * len(rows_RLK) >= 8 and spec.num_experts > 1):
        wrong_table = "" if zero.all() else ". If the layer is dense, the model's layers are stated wrong: pass its own"
        raise CaptureError(
            f"{what} has nothing but zeros in {int(zero.sum())} of {spec.num_layers} layers (first: "
            f"{spec.layers[int(np.argmax(zero))]}); the engine never filled them. Compiled or fused MoE "
            f"paths bypass the capture: try enforce_eager=True, another MoE kernel, or a newer engine{wrong_table}"
        )


def _first(bad_RL: NDArray[np.bool_], rows_RLK: NDArray[Any], spec: RoutingSpec, first_position: int) -> str:
    row, layer = (int(i) for i in np.argwhere(bad_RL)[0])
    return f"position {first_position + row}, {spec.layers[layer]} has expert ids {rows_RLK[row, layer].tolist()}"
