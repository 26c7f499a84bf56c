"""Where the tokens of a padded batch stand in a trace, found by the tokens themselves."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import BatchMismatchError
from foreroute.layout.runs import PAD, join_ranges
from foreroute.trace import RoutingTrace
from foreroute.trace.check import as_offsets


def locate_rows(
    trace: RoutingTrace, input_ids_BT: ArrayLike, attention_mask_BT: ArrayLike | None = None
) -> NDArray[np.int64]:
    """The packed row of every slot of a padded batch, flattened batch first.

    Sequence b of the batch must be sequence b of the trace, token by token. Its tokens are those the mask keeps, in
    order, wherever the padding is. It may end before the trace's does if only rows without a route are left out, such
    as that of the last sampled token.

    Args:
        trace: B sequences.
        input_ids_BT: integers [B, T].
        attention_mask_BT: 0 or 1 [B, T], 0 for padding; everything is a token by default.

    Returns:
        int64 [B · T], -1 where the mask is 0.

    Raises:
        BatchMismatchError: naming the first sequence and position that differ, and the order of the trace's sequences
            that would fit, if there is one.
    """
    ids_BT, kept_BT = _checked(input_ids_BT, attention_mask_BT)
    if len(ids_BT) != len(trace):
        _refuse(trace, ids_BT, kept_BT, f"the batch has {len(ids_BT)} sequences and the trace has {len(trace)}")
    length_B = kept_BT.sum(axis=1)
    shared_B = np.minimum(length_B, trace.lengths)
    rows = join_ranges(trace.offsets[:-1], shared_B)
    tokens = ids_BT[kept_BT][join_ranges(as_offsets(length_B)[:-1], shared_B)]
    differs = tokens != trace.token_ids_N[rows]
    if differs.any():
        b, position = _place(int(differs.argmax()), shared_B)
        row = int(trace.offsets[b]) + position
        ours, theirs = int(tokens[differs.argmax()]), int(trace.token_ids_N[row])
        _refuse(
            trace,
            ids_BT,
            kept_BT,
            f"sequence {b}, position {position}: token {ours} in the batch, {theirs} in the trace",
        )
    _check_ends(trace, ids_BT, kept_BT)
    located = np.full(ids_BT.size, PAD, np.int64)
    located[kept_BT.reshape(-1)] = rows
    return located


def _checked(ids: ArrayLike, mask: ArrayLike | None) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    ids_BT = np.asarray(ids)
    if ids_BT.ndim != 2 or ids_BT.dtype.kind not in "iu":
        raise BatchMismatchError(f"input_ids are {ids_BT.dtype} of shape {ids_BT.shape}; expected integers [B, T]")
    if mask is None:
        return ids_BT, np.ones(ids_BT.shape, np.bool_)
    mask_BT = np.asarray(mask)
    kept_BT = mask_BT == 1
    if mask_BT.shape != ids_BT.shape or not (kept_BT | (mask_BT == 0)).all():
        raise BatchMismatchError(
            f"attention_mask has shape {mask_BT.shape}; expected {ids_BT.shape}, of zeros and ones. "
            "Attention patterns (4-D masks, segment numbers) do not say which tokens are padding"
        )
    return ids_BT, kept_BT


def _check_ends(trace: RoutingTrace, ids_BT: NDArray[Any], kept_BT: NDArray[np.bool_]) -> None:
    """Refuse sequences that go on after the trace's, and such as leave out rows that have a route."""
    length_B = kept_BT.sum(axis=1)
    longer = length_B > trace.lengths
    if longer.any():
        b = int(longer.argmax())
        _refuse(
            trace,
            ids_BT,
            kept_BT,
            f"sequence {b} has {int(length_B[b])} tokens in the batch and {int(trace.lengths[b])} in the trace, equal "
            "up to there; pass the attention mask if the rest is padding, or join the rest with trace.continued_by",
        )
    routed_before = as_offsets(trace.valid_N.astype(np.int64))
    left_out = routed_before[trace.offsets[1:]] - routed_before[trace.offsets[:-1] + length_B]
    if left_out.any():
        b = int(left_out.argmax())
        _refuse(
            trace,
            ids_BT,
            kept_BT,
            f"sequence {b} ends after {int(length_B[b])} of {int(trace.lengths[b])} tokens and leaves out "
            f"{int(left_out[b])} rows that have a route; cut them on purpose with trace.truncated(lengths)",
        )


def _place(token: int, shared_B: NDArray[np.int64]) -> tuple[int, int]:
    """Sequence and position of the token of that number among the shared ones."""
    offsets = as_offsets(shared_B)
    b = int(np.searchsorted(offsets, token, side="right") - 1)
    return b, token - int(offsets[b])


def _refuse(trace: RoutingTrace, ids_BT: NDArray[Any], kept_BT: NDArray[np.bool_], seen: str) -> None:
    order = _matching_order(trace, ids_BT, kept_BT)
    if order is None:
        hint = "expected the batch that the trace was recorded for, sequence by sequence"
    else:
        shown = f"{order}" if len(order) <= 64 else f"{str(order[:64])[:-1]}, …]"
        hint = f"the batch holds the sequences {shown} of the trace, in that order: replay trace.select of them"
    raise BatchMismatchError(f"{seen}. {hint[0].upper()}{hint[1:]}")


def _matching_order(trace: RoutingTrace, ids_BT: NDArray[Any], kept_BT: NDArray[np.bool_]) -> list[int] | None:
    """The sequence of the trace that each of the batch equals, whole or without its unrouted last token."""
    free = defaultdict(list)
    for s in reversed(range(len(trace))):
        tokens = trace.tokens(s).astype(np.int64)
        free[tokens.tobytes()].append(s)
        if len(tokens) and not trace.valid_N[trace.offsets[s + 1] - 1]:
            free[tokens[:-1].tobytes()].append(s)
    order = []
    used: set[int] = set()
    for ids, kept in zip(ids_BT, kept_BT, strict=True):
        candidates = free.get(ids[kept].astype(np.int64).tobytes(), [])
        chosen = next((s for s in reversed(candidates) if s not in used), candidates[-1] if candidates else None)
        if chosen is None:
            return None
        used.add(chosen)
        order.append(chosen)
    return order if order != list(range(len(trace))) else None
