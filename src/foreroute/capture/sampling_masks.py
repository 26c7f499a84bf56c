"""Sampling masks of engines: the tokens that each sampled token was drawn from, on the rows of a trace.

vLLM (from 0.28) and SGLang (0.5.23) return one list of ids for each generated token, vLLM's in `sampling_mask`, SGLang's
in `meta_info.output_token_sampling_mask`. Nothing is repaired: a set that lacks the token that was sampled is refused.
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

    Row p holds the set that token p + 1 was drawn from; a set of all tokens is one that left nothing out.

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
    valid, counts = (np.zeros(sum(map(len, tokens)), kind) for kind in (np.bool_, np.int64))
    next_ids, ids, start = np.zeros(len(valid), np.int64), [np.zeros(0, np.int64)], 0
    for s, (raw, own) in enumerate(zip(sequences, tokens, strict=True)):
        sets = _sets(raw, s, len(own))
        first, after = start + len(own) - 1 - len(sets), start + len(own) - 1
        valid[first:after] = True
        next_ids[start:after] = own[1:]
        sizes = np.array([len(each) for each in sets], np.int64)
        if sets and not sizes.all():
            raise CaptureError(f"the mask of generated token {int(sizes.argmin())} of sequence {s} is empty")
        everything = [len(each) == vocabulary_size and len(np.unique(each)) == vocabulary_size for each in sets]
        ids += [each for each, all_tokens in zip(sets, everything, strict=True) if not all_tokens]
        counts[first:after] = np.where(np.array(everything, np.bool_), 0, sizes)
        start += len(own)
    try:
        stream = DecisionStream.from_sets(vocabulary_size, valid, counts, np.concatenate(ids))
    except TraceContentError as error:
        raise CaptureError(f"the sampling masks cannot be true: {error}") from error
    outside = valid & ~stream.contain(next_ids)
    if outside.any():
        row = int(outside.argmax())
        raise CaptureError(
            f"token {int(next_ids[row])} was sampled and is not in its mask ({int(outside.sum())} such tokens); the "
            "masks belong to other tokens, or the sampler drew from another set than it kept"
        )
    return stream


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
    generated = num_tokens - 1 if response is None else len(items_of(response, "the response"))
    if len(sets) > generated or (response is not None and len(sets) < generated):
        raise CaptureError(
            f"sequence {sequence} has {len(sets)} sampling masks for {generated} "
            f"{'tokens behind its first' if response is None else 'generated tokens'}; expected one for each generated "
            "token"
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
