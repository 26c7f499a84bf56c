"""Where sequences begin inside the rows of a batch: packed sequences share a row, and positions start anew."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import BatchMismatchError
from foreroute.trace.checks import ascending


def starts_from_positions(position_ids: ArrayLike, kept_BT: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The first token of each sequence: the first one kept in a row, and every kept one at position 0.

    Args:
        position_ids: integers [B, T] or [1, T].
        kept_BT: bool [B, T], False where padded. What positions say about padding does not matter.

    Returns:
        bool [B, T].

    Raises:
        BatchMismatchError: when the shapes do not fit.
    """
    positions = np.asarray(position_ids)
    if positions.ndim != 2 or positions.shape[1] != kept_BT.shape[1] or positions.shape[0] not in (1, len(kept_BT)):
        raise BatchMismatchError(f"position_ids have shape {positions.shape}; expected {kept_BT.shape}")
    return np.asarray(kept_BT & ((positions == 0) | _first_of_row(kept_BT)))


def starts_from_cumulative_lengths(cumulative: ArrayLike, kept_BT: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The first token of each sequence of one packed row, from the offsets that variable-length attention takes.

    Args:
        cumulative: integers [S + 1], from 0 to T (`cu_seq_lens_q`). An empty sequence is no sequence.
        kept_BT: bool [1, T].

    Returns:
        bool [1, T].

    Raises:
        BatchMismatchError: when they are not the offsets of one row of T slots.
    """
    offsets = np.asarray(cumulative)
    if len(kept_BT) != 1 or offsets.ndim != 1 or not len(offsets) or offsets.dtype.kind not in "iu":
        raise BatchMismatchError(
            f"cumulative lengths are {offsets.dtype} of shape {offsets.shape} for a batch of {len(kept_BT)} rows; "
            "expected integers [sequences + 1] of one row"
        )
    if not ascending(offsets, kept_BT.shape[1]):
        raise BatchMismatchError(
            f"cumulative lengths run from {int(offsets[0])} to {int(offsets[-1])}; expected 0 to {kept_BT.shape[1]}, "
            "the slots of the row, and none below the one before it"
        )
    starts = np.zeros(kept_BT.shape, np.bool_)
    starts[0, offsets[:-1][offsets[1:] > offsets[:-1]]] = True
    return kept_BT & (starts | _first_of_row(kept_BT))


def _first_of_row(kept_BT: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return np.asarray(kept_BT & (np.cumsum(kept_BT, axis=1) == 1))
