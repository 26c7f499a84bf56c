"""Padded batches: which trace row belongs to each slot of a [B, T] batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import BatchMismatchError
from foreroute.trace import RoutingTrace


def locate_rows(
    trace: RoutingTrace, input_ids_BT: NDArray[Any], attention_mask_BT: NDArray[Any] | None = None
) -> NDArray[np.int64]:
    """Packed trace row of every slot of a batch, flattened batch-first.

    The tokens decide: batch row b must hold exactly the tokens of sequence b, so a shifted, shuffled or foreign trace
    is refused. A batch may leave out trailing tokens of a sequence whose rows are absent in the trace (trainers feed
    T - 1 of T tokens).

    Args:
        trace: the routes of B sequences, in the order of the batch.
        input_ids_BT: integers [B, T].
        attention_mask_BT: [B, T], 0 or False where a slot is padding, on either side; None when nothing is padded.

    Returns:
        int64 [B * T]; -1 for padding.

    Raises:
        BatchMismatchError: naming the first sequence and position that differ.
    """
    if input_ids_BT.ndim != 2 or len(input_ids_BT) != len(trace):
        raise BatchMismatchError(
            f"the batch has shape {input_ids_BT.shape}, the trace has {len(trace)} sequences of lengths "
            f"{trace.lengths.tolist()[:8]}; expected one batch row per sequence (select the sequences of this batch)"
        )
    kept_BT = np.ones(input_ids_BT.shape, bool) if attention_mask_BT is None else attention_mask_BT.astype(bool)
    if kept_BT.shape != input_ids_BT.shape:
        raise BatchMismatchError(f"attention_mask has shape {kept_BT.shape}; expected {input_ids_BT.shape}")
    kept_B = kept_BT.sum(axis=1)
    _check_lengths(trace, kept_B)
    position_BT = np.cumsum(kept_BT, axis=1) - 1
    row_BT = np.where(kept_BT, trace.offsets[:-1, None] + position_BT, -1)
    _check_tokens(trace, input_ids_BT, row_BT)
    return row_BT.reshape(-1)


def _check_lengths(trace: RoutingTrace, kept_B: NDArray[np.int64]) -> None:
    for sequence in np.flatnonzero(kept_B != trace.lengths):
        start, length, kept = int(trace.offsets[sequence]), int(trace.lengths[sequence]), int(kept_B[sequence])
        omitted = trace.valid_N[start + kept : start + length]
        if kept > length or omitted.any():
            raise BatchMismatchError(
                f"sequence {sequence} has {kept} tokens in the batch and {length} rows in the trace; "
                "expected the same tokens (pass the attention mask if the batch is padded)"
            )


def _check_tokens(trace: RoutingTrace, input_ids_BT: NDArray[Any], row_BT: NDArray[np.int64]) -> None:
    wrong_BT = (row_BT >= 0) & (trace.token_ids_N[row_BT] != input_ids_BT) if trace.num_rows else row_BT >= 0
    if wrong_BT.any():
        sequence, slot = (int(i) for i in np.argwhere(wrong_BT)[0])
        row = int(row_BT[sequence, slot])
        raise BatchMismatchError(
            f"sequence {sequence}, position {row - int(trace.offsets[sequence])}: the batch has token "
            f"{int(input_ids_BT[sequence, slot])}, the trace was recorded for token {int(trace.token_ids_N[row])} "
            f"({int(wrong_BT.sum())} tokens differ). Check order, shift and padding side of the batch"
        )
