"""Matching of the tokens of a batch to rows of a trace; packed sequences share a row of the batch."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import as_array, as_mask
from foreroute.errors import BatchMismatchError
from foreroute.layout.rank_rows import PAD
from foreroute.trace import RoutingTrace
from foreroute.trace.checks import as_offsets, ascending, join_ranges, place_of


def locate_rows(
    trace: RoutingTrace,
    input_ids_BT: ArrayLike,
    attention_mask_BT: ArrayLike | None = None,
    starts_BT: ArrayLike | None = None,
) -> NDArray[np.int64]:
    """Find the packed row of every router row of a batch, flattened batch first: int64 [B · T], -1 where the mask is 0.

    Sequence s of the batch, row by row and from left to right, must be sequence s of the trace, token by token. It may
    end early where only rows without a route are left out, such as that of the last sampled token. A batch of padding
    alone also fits a trace of no sequences.

    Args:
        trace: S sequences.
        input_ids_BT: integers [B, T].
        attention_mask_BT: 0 or 1 [B, T], 0 for padding, wherever it is; everything is a token by default.
        starts_BT: bool [B, T], the first token of each sequence, as from `starts_from_positions`; one sequence per row
            by default.

    Raises:
        BatchMismatchError: naming the first sequence and position that differ, and the order of the trace's sequences
            that would fit, if there is one.
    """
    ids_BT, kept_BT = _checked(input_ids_BT, attention_mask_BT)
    token_ids, length_S = ids_BT[kept_BT], _lengths(kept_BT, starts_BT)
    located = np.full(ids_BT.size, PAD, np.int64)
    if not len(trace) and not token_ids.size:
        return located
    rows, objection = _compared(trace, token_ids, length_S)
    if objection:
        sequences = np.split(token_ids, np.cumsum(length_S)[:-1])
        raise BatchMismatchError(f"{objection}. {_advice(trace, sequences)}")
    located[kept_BT.reshape(-1)] = rows
    return located


def order_by_tokens(trace: RoutingTrace, sequences: Iterable[NDArray[Any]]) -> NDArray[np.int64] | None:
    """Find which sequence of the trace each of some sequences is: int64; None where one of them is nowhere in it.

    Sequences of equal tokens are given out in the order of the trace, each once while there is another. One whose last
    row has no route may be met without its last token.
    """
    numbers: dict[bytes, deque[int]] = defaultdict(deque)
    for s in range(len(trace)):
        numbers[_key(trace.tokens(s))].append(s)
    for s in np.flatnonzero(trace.lengths > 0).tolist():
        if not trace.valid_N[trace.offsets[s + 1] - 1]:
            numbers[_key(trace.tokens(s)[:-1])].append(s)
    order = []
    for token_ids in sequences:
        found = numbers.get(_key(token_ids))
        if found is None:
            return None
        order.append(found.popleft() if len(found) > 1 else found[0])
    return np.array(order, np.int64)


def _key(token_ids: NDArray[Any]) -> bytes:
    """Return tokens as a key."""
    return token_ids.astype(np.int64).tobytes()


def _lengths(kept_BT: NDArray[np.bool_], starts_BT: ArrayLike | None) -> NDArray[np.int64]:
    """Return the tokens of each sequence of a batch, int64 [S]."""
    if starts_BT is None:
        return np.asarray(kept_BT.sum(axis=1))
    given_BT = as_mask(starts_BT, name="starts", error=BatchMismatchError)
    if given_BT.shape != kept_BT.shape:
        raise BatchMismatchError(f"starts are of shape {given_BT.shape}; expected {kept_BT.shape}")
    begins = np.flatnonzero(given_BT[kept_BT])
    if len(begins) and begins[0]:
        raise BatchMismatchError("the first token of the batch is in no sequence; expected it to start one")
    return np.diff(begins, append=kept_BT.sum())


def _checked(ids: ArrayLike, mask: ArrayLike | None) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return ids and mask, once their types and shapes fit."""
    ids_BT = as_array(ids, name="input_ids", error=BatchMismatchError)
    if ids_BT.ndim != 2 or ids_BT.dtype.kind not in "iu":
        raise BatchMismatchError(f"input_ids are {ids_BT.dtype} of shape {ids_BT.shape}; expected integers [B, T]")
    if mask is None:
        return ids_BT, np.ones(ids_BT.shape, np.bool_)
    shape = as_array(mask, name="attention_mask", error=BatchMismatchError).shape
    if shape != ids_BT.shape:
        raise BatchMismatchError(
            f"attention_mask has shape {shape}; expected {ids_BT.shape}. Attention patterns (4-D) do not say which "
            "tokens are padding"
        )
    return ids_BT, as_mask(mask, name="attention_mask", error=BatchMismatchError)


def _compared(
    trace: RoutingTrace, token_ids: NDArray[Any], length_S: NDArray[np.int64]
) -> tuple[NDArray[np.int64], str]:
    """Return the rows of the trace that the tokens of a batch are, and what speaks against it; "" for nothing."""
    if len(length_S) != len(trace):
        return np.zeros(0, np.int64), f"the batch has {len(length_S)} sequences and the trace has {len(trace)}"
    shared_S = np.minimum(length_S, trace.lengths)
    rows = join_ranges(trace.offsets[:-1], shared_S)
    tokens = token_ids[join_ranges(np.cumsum(length_S) - length_S, shared_S)]
    differs = tokens != trace.token_ids_N[rows]
    if differs.any():
        first = int(differs.argmax())
        s, position = place_of(first, as_offsets(shared_S))
        traced = int(trace.token_ids_N[rows[first]])
        return rows, f"sequence {s}, position {position}: token {tokens[first]} in the batch, {traced} in the trace"
    longer = length_S > trace.lengths
    if longer.any():
        s = int(longer.argmax())
        return rows, (
            f"sequence {s} has {int(length_S[s])} tokens in the batch and {int(trace.lengths[s])} in the trace, equal "
            "up to there; pass the attention mask if the rest is padding. Tokens that no router has seen, such as the "
            "last sampled one, are joined with trace.continued_by(RoutingTrace.unrouted(spec, tokens)); behind "
            "generate recording.rollout(tokens, mask) does so"
        )
    routed_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(trace.valid_N)])
    left_out = routed_before[trace.offsets[1:]] - routed_before[trace.offsets[:-1] + length_S]
    if left_out.any():
        s = int(left_out.argmax())
        return rows, (
            f"sequence {s} ends after {int(length_S[s])} of {int(trace.lengths[s])} tokens and leaves out "
            f"{int(left_out[s])} rows that have a route; cut them on purpose with trace.truncated(lengths)"
        )
    return rows, ""


def _advice(trace: RoutingTrace, sequences: Iterable[NDArray[Any]]) -> str:
    """Say which sequences of the trace a batch holds, where those are not all in order."""
    order = order_by_tokens(trace, sequences)
    if order is None or np.array_equal(order, np.arange(len(trace))):
        return (
            "Expected the batch that the trace was recorded for, sequence by sequence. If the batch has padding, pass "
            "its attention_mask, with 0 there"
        )
    shown = f"{order.tolist()}" if len(order) <= 64 else f"{str(order[:64].tolist())[:-1]}, …]"
    return f"The batch holds the sequences {shown} of the trace, in that order: replay trace.select of them"


def starts_from_positions(position_ids: ArrayLike, kept_BT: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Find the first token of each sequence, bool [B, T]: the first that is kept in a row, and each at position 0.

    Position ids are integers [B, T] or [1, T], and say nothing where `kept_BT` is False.

    Raises:
        BatchMismatchError: when the shapes do not fit.
    """
    positions = as_array(position_ids, name="position_ids", error=BatchMismatchError)
    if positions.ndim != 2 or positions.shape[1] != kept_BT.shape[1] or positions.shape[0] not in (1, len(kept_BT)):
        raise BatchMismatchError(f"position_ids have shape {positions.shape}; expected {kept_BT.shape}")
    return np.asarray(kept_BT & ((positions == 0) | _first_of_row(kept_BT)))


def starts_from_cumulative_lengths(cumulative: ArrayLike, kept_BT: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Find the first token of each sequence of one packed row, bool [1, T], of which `kept_BT` keeps some.

    Cumulative lengths are the `cu_seq_lens_q` of attention, integers [S + 1] from 0 to T; empty sequences are none.

    Raises:
        BatchMismatchError: when they are not the offsets of one row of T positions.
    """
    offsets = as_array(cumulative, name="cumulative lengths", error=BatchMismatchError)
    if len(kept_BT) != 1 or offsets.ndim != 1 or not len(offsets) or offsets.dtype.kind not in "iu":
        raise BatchMismatchError(
            f"cumulative lengths are {offsets.dtype} of shape {offsets.shape} for a batch of {len(kept_BT)} rows; "
            "expected integers [sequences + 1] of one row"
        )
    if not ascending(offsets, kept_BT.shape[1]):
        raise BatchMismatchError(
            f"cumulative lengths run from {int(offsets[0])} to {int(offsets[-1])}; expected 0 to {kept_BT.shape[1]}, "
            "the positions of the row, and none below the one before it"
        )
    starts = np.zeros(kept_BT.shape, np.bool_)
    starts[0, offsets[:-1][offsets[1:] > offsets[:-1]]] = True
    return kept_BT & (starts | _first_of_row(kept_BT))


def _first_of_row(kept_BT: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Mark the first kept token of each row."""
    return np.asarray(kept_BT & (np.cumsum(kept_BT, axis=1) == 1))
