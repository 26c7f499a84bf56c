"""Where the responses of a batch of verl lie, and which of their tokens are trained on. Padded and unpadded alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foreroute.capture.recognition import kept_by_mask
from foreroute.errors import BatchMismatchError, CaptureError, ReplayError
from foreroute.trace import RoutingTrace
from foreroute.trainers.verl.protocol import field_of, require_zeros_and_ones


def sampled_mask(batch: Any) -> list[NDArray[np.bool_]]:
    """S arrays bool [R], one for each token of each response: True where it was sampled and is trained on."""
    mask = require_zeros_and_ones(field_of(batch, "response_mask"), "response_mask")
    masks = parts_of(mask, response_lengths(batch))
    return [mask.astype(np.bool_) for mask in masks]


def response_lengths(batch: Any) -> NDArray[np.int64]:
    """int64 [S], tokens of each response, those of tools included."""
    responses: Any = field_of(batch, "responses")
    if responses.is_nested:
        return np.asarray(responses.offsets().diff().cpu().numpy(), np.int64)
    width = responses.shape[1]
    if width == 0:
        return np.zeros(len(responses), np.int64)
    mask = require_zeros_and_ones(field_of(batch, "attention_mask"), "attention_mask")
    if not mask.is_nested:
        kept_by_mask(mask.cpu().numpy())
    lengths = [int(row[-width:].sum()) for row in mask.unbind()] if mask.is_nested else mask[:, -width:].sum(1).tolist()
    return np.array(lengths, np.int64)


def parts_of(values: Tensor, lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    """The first `lengths[s]` entries of each row, of a nested tensor or of one padded on the right."""
    return [row[:length] for row, length in _rows(values, lengths, spare=0)]


def of_responses(values: Tensor, lengths: NDArray[np.int64]) -> list[NDArray[np.float32]]:
    """S arrays [R]: what an engine of verl says of each response token, it having one entry for each input position."""
    return [row[len(row) - 1 - length : len(row) - 1] for row, length in _rows(values, lengths, spare=1)]


def _rows(values: Tensor, lengths: NDArray[np.int64], *, spare: int) -> Iterator[tuple[NDArray[Any], int]]:
    """Each row with the length of its response, which it must have room for, and `spare` entries more."""
    rows = [row.detach().float().cpu().numpy() for row in values.unbind()]
    if len(rows) != len(lengths):
        raise CaptureError(f"a field of the batch has {len(rows)} rows for {len(lengths)} responses; expected as many")
    for s, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
        if len(row) < length + spare:
            raise CaptureError(
                f"sequence {s} has {len(row)} entries for a response of {length} tokens; expected {length + spare} or "
                "more"
            )
        yield row, length


def require_routed(trace: RoutingTrace, batch: Any) -> None:
    """Raise `ReplayError` when a row is absent that a trained token depends on.

    A token depends on the rows before it. Rows after the last trained token may be absent: that of the last token,
    those of an answer of a tool at the end, and all of a sequence that only fills the batch up.
    """
    masks = sampled_mask(batch)
    if len(masks) != len(trace):
        raise BatchMismatchError(f"the trace has {len(trace)} sequences, the batch {len(masks)}; expected the same")
    for s, (mask, length) in enumerate(zip(masks, trace.lengths, strict=True)):
        if len(mask) > length:
            raise BatchMismatchError(f"sequence {s} has {length} tokens, and its response {len(mask)}")
        if not mask.any():
            continue
        last = int(length) - len(mask) + int(np.flatnonzero(mask)[-1])
        rows = trace.valid_N[trace.offsets[s] : trace.offsets[s] + last]
        if not rows.all():
            raise ReplayError(
                f"sequence {s} of the micro-batch has no route at position {int(np.argmin(rows))}, and trains on "
                f"tokens up to position {last}: the rollout engine did not return it (a row of zeros is an absent one)"
            )
