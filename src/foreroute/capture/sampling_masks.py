"""Sampling masks of engines: the tokens that each sampled token was drawn from, on the rows of a trace.

vLLM (from 0.28) and SGLang (0.5.23) return one list of ids for each generated token: vLLM in `sampling_mask`, SGLang in
`meta_info.output_token_sampling_mask`. Nothing is repaired: a set that lacks the token that was sampled is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.arrays import field_of, items_of
from foreroute.capture.recognition import RawSequence
from foreroute.errors import CaptureError, TraceContentError, shown
from foreroute.mismatch.decisions import misplaced_masks
from foreroute.trace import SAMPLING, DecisionStream, RoutingTrace


def decode_masks(
    trace: RoutingTrace,
    sequences: Sequence[RawSequence],  # of the trace, as they were found, each with its masks
    vocabulary_size: int | None,  # tokens of the model; None when it is not known
) -> RoutingTrace:
    """Read the masks of all sequences: row p holds the set that token p + 1 was drawn from."""
    if vocabulary_size is None:
        raise CaptureError(
            "the output has sampling masks, and the size of the vocabulary is not known; pass vocabulary_size="
        )
    valid_N, counts_N, ids = np.zeros(trace.num_rows, np.bool_), np.zeros(trace.num_rows, np.int64), []
    for s, (raw, end) in enumerate(zip(sequences, trace.offsets[1:], strict=True)):
        counts_R, flat = _sets(raw, s, int(trace.lengths[s]))
        here = slice(end - 1 - len(counts_R), end - 1)  # the rows before the last tokens
        valid_N[here], counts_N[here] = True, counts_R
        ids.append(flat)
    return with_masks(trace, vocabulary_size, valid_N, counts_N, np.concatenate(ids))


def with_masks(
    trace: RoutingTrace,
    vocabulary_size: int,  # tokens of the model
    valid_N: NDArray[np.bool_],  # [N], the rows before a sampled token
    counts_N: NDArray[np.int64],  # [N], ids of each set, 0 elsewhere
    ids: NDArray[Any],  # integers, those of all sets joined
) -> RoutingTrace:
    """Give a trace with the masks of the rows that have one, each of which holds the token that was sampled."""
    empty_N = valid_N & (counts_N == 0)
    if empty_N.any():
        raise CaptureError(f"the sampling mask of the token behind row {int(empty_N.argmax())} is empty")
    try:
        trace = trace.with_stream(SAMPLING, DecisionStream.from_sets(vocabulary_size, valid_N, counts_N, ids))
    except TraceContentError as error:
        raise CaptureError(f"the sampling masks cannot be true: {error}") from error
    if wrong := misplaced_masks(trace):
        raise CaptureError(f"of the sampling masks, {wrong}")
    return trace


def masks_of_steps(
    # of step r, a sequence and a token for each token that was kept: `np.nonzero` of bool [S, V]; none of a sequence
    # of which none was left out
    steps: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
    vocabulary_size: int,  # V
    prompt_lengths: NDArray[np.int64],  # [S]
    response_lengths: NDArray[np.int64],  # [S]; what a sequence kept after its end is left out
) -> DecisionStream:
    """Put what sampling kept, step by step for S sequences together, on the rows of these sequences."""
    lengths = prompt_lengths + response_lengths
    ends = np.cumsum(lengths)
    first_row_S = ends - response_lengths - 1
    valid_N = np.zeros(int(ends[-1]), np.bool_)
    for first, length in zip(first_row_S, np.minimum(response_lengths, len(steps)), strict=True):
        valid_N[first : first + length] = True
    sequences, ids = (np.concatenate([step[part] for step in steps]) for part in (0, 1))
    numbers = np.repeat(np.arange(len(steps)), [len(step[0]) for step in steps])
    belongs = numbers < response_lengths[sequences]
    rows = (first_row_S[sequences] + numbers)[belongs]
    counts = np.bincount(rows, minlength=len(valid_N))
    order = np.argsort(rows, kind="stable")
    return DecisionStream.from_sets(vocabulary_size, valid_N, counts, ids[belongs][order])


def _sets(raw: RawSequence, sequence: int, num_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sets of one sequence, one for each of its last tokens: their sizes, and the ids of all joined."""
    given = raw.sampling_mask
    masks = given if isinstance(given, list | tuple) else field_of(given, "token_ids")
    if not isinstance(masks, list | tuple):
        raise CaptureError(
            f"the sampling mask of sequence {sequence} is a {type(given).__name__}; expected a list of token ids for "
            "each generated token"
        )
    masks = items_of(masks, "the sampling mask")
    # a mask stands on the row before its token, so that the first token of a sequence has none
    rows = max(num_tokens - 1, 0)
    response = raw.response_token_ids
    generated = None if response is None else len(items_of(response, "the response"))
    if len(masks) > rows or (generated is not None and len(masks) != generated):
        raise CaptureError(
            f"sequence {sequence} has {len(masks)} sampling masks, {num_tokens} tokens"
            f"{'' if generated is None else f' and {generated} of them generated'}; expected a mask for each generated "
            "token, and a prompt of one token at least"
        )
    return _join_masks(masks, sequence)


def _join_masks(masks: list[Any], sequence: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Join lists or arrays of ids, all ids at once: a step of Python for each sampled token would take minutes."""
    # no classes derived from these are read, which may do anything
    types = set(map(type, masks))
    try:
        if types <= {list, tuple} and set(map(type, chain.from_iterable(masks))) <= {int}:
            counts_R = np.fromiter(map(len, masks), np.int64, len(masks))
            return counts_R, np.fromiter(chain.from_iterable(masks), np.int64, int(counts_R.sum()))
        if types == {np.ndarray} and all(mask.ndim == 1 and mask.dtype.kind in "iu" for mask in masks):
            counts_R = np.fromiter(map(len, masks), np.int64, len(masks))
            return counts_R, np.concatenate(masks, dtype=np.int64, casting="same_kind")
    except OverflowError:
        pass  # an id beyond 64 bits, which is no token either
    raise CaptureError(
        f"the sampling mask of sequence {sequence} holds {shown(masks)}; expected a list of token ids for each "
        "generated token"
    )
