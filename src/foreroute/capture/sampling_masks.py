"""Sampling masks of engines: the tokens that each sampled token was drawn from, on the rows of a trace.

vLLM (from 0.28) and SGLang (0.5.23) return one list of ids for each generated token: vLLM in `sampling_mask`, SGLang in
`meta_info.output_token_sampling_mask`. Nothing is repaired: a set that lacks the token that was sampled is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.recognition import MAX_INT32, RawSequence, as_array, field_of, is_array, items_of, shown
from foreroute.errors import CaptureError, TraceContentError
from foreroute.trace import DecisionStream


def decode_masks(
    sequences: Sequence[RawSequence], tokens: Sequence[NDArray[np.int32]], vocabulary_size: int | None
) -> DecisionStream | None:
    """Read the masks of all sequences, or return None when no sequence has any.

    Row p holds the set that token p + 1 was drawn from.

    Args:
        sequences: as they were found.
        tokens: int32 [T] of each, prompt and response.
        vocabulary_size: tokens of the model; None when it is not known.

    Raises:
        CaptureError: when some sequences have masks and others do not, or masks cannot be those of the tokens.
    """
    with_masks = [raw.sampling_mask is not None for raw in sequences]
    if not any(with_masks):
        return None
    if not all(with_masks):
        raise CaptureError(
            f"sequence {with_masks.index(False)} has no sampling mask and others have; ask for all of them"
        )
    if vocabulary_size is None:
        raise CaptureError(
            "the output has sampling masks, and the size of the vocabulary is not known; pass "
            "model=ModelFacts(spec, vocabulary_size=...)"
        )
    valid = np.zeros(sum(map(len, tokens)), np.bool_)
    counts, next_ids = np.zeros((2, len(valid)), np.int64)
    ids, start = [np.zeros(0, np.int64)], 0
    for s, (raw, own) in enumerate(zip(sequences, tokens, strict=True)):
        sets = _sets(raw, s, len(own))
        after = start + max(len(own) - 1, 0)
        first = after - len(sets)
        valid[first:after] = True
        next_ids[start:after] = own[1:]
        sizes = np.array([len(each) for each in sets], np.int64)
        if sets and not sizes.all():
            raise CaptureError(f"the mask of generated token {int(sizes.argmin())} of sequence {s} is empty")
        ids += sets
        counts[first:after] = sizes
        start += len(own)
    try:
        stream = DecisionStream.from_sets(vocabulary_size, valid, counts, np.concatenate(ids))
    except TraceContentError as error:
        raise CaptureError(f"the sampling masks cannot be true: {error}") from error
    outside = valid & ~stream.contains(next_ids)
    if outside.any():
        row = int(outside.argmax())
        raise CaptureError(
            f"token {int(next_ids[row])} was sampled and is not in its mask ({int(outside.sum())} such tokens); the "
            "masks belong to other tokens, or the sampler drew from another set than it kept"
        )
    return stream


def masks_of_steps(
    steps: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
    vocabulary_size: int,
    prompt_lengths: NDArray[np.int64],
    response_lengths: NDArray[np.int64],
) -> DecisionStream:
    """Put what sampling kept, step by step for S sequences together, on the rows of these sequences.

    Args:
        steps: of step r, a sequence and a token for each token that was kept: `np.nonzero` of bool [S, V].
        vocabulary_size: V.
        prompt_lengths: int64 [S].
        response_lengths: int64 [S]; what a sequence kept after its end is left out.
    """
    lengths = prompt_lengths + response_lengths
    ends = np.cumsum(lengths)
    sequences, ids = (np.concatenate([step[part] for step in steps]) for part in (0, 1))
    numbers = np.repeat(np.arange(len(steps)), [len(step[0]) for step in steps])
    first_rows = (ends - lengths + prompt_lengths - 1)[sequences]
    belongs = numbers < response_lengths[sequences]
    rows = (first_rows + numbers)[belongs]
    counts = np.bincount(rows, minlength=int(ends[-1]))
    order = np.argsort(rows, kind="stable")
    return DecisionStream.from_sets(vocabulary_size, counts > 0, counts, ids[belongs][order])


def _sets(raw: RawSequence, sequence: int, num_tokens: int) -> list[NDArray[np.int64]]:
    """Return the sets of one sequence, one for each of its last tokens."""
    held = field_of(raw.sampling_mask, "token_ids") if not isinstance(raw.sampling_mask, list | tuple) else None
    masks = raw.sampling_mask if held is None else held
    if not isinstance(masks, list | tuple):
        raise CaptureError(
            f"the sampling mask of sequence {sequence} is a {type(masks).__name__}; expected a list of token ids for "
            "each generated token"
        )
    sets = [_ids(each, sequence) for each in items_of(masks, "the sampling mask")]
    response = raw.response_token_ids
    rows = max(num_tokens - 1, 0)
    generated = rows if response is None else len(items_of(response, "the response"))
    if len(sets) > generated or (response is not None and len(sets) < generated):
        raise CaptureError(
            f"sequence {sequence} has {len(sets)} sampling masks for {generated} "
            f"{'tokens behind its first' if response is None else 'generated tokens'}; expected one for each generated "
            "token"
        )
    if len(sets) > rows:
        raise CaptureError(
            f"sequence {sequence} has {len(sets)} sampling masks and {num_tokens} tokens, and a mask stands on the row "
            "before its token; expected a prompt of one token at least"
        )
    return sets


def _ids(values: Any, sequence: int) -> NDArray[np.int64]:
    array = as_array(values, "a sampling mask") if is_array(values) else None
    if isinstance(values, list | tuple) and all(type(value) is int for value in items_of(values, "a sampling mask")):
        array = np.asarray(values)  # integers beyond 64 bits come as objects
    if array is None or array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise CaptureError(f"a sampling mask of sequence {sequence} is {shown(values)}; expected a list of token ids")
    if array.size and (array.min() < 0 or array.max() > MAX_INT32):
        raise CaptureError(f"a sampling mask of sequence {sequence} has ids from {array.min()} to {array.max()}")
    return array.astype(np.int64)
