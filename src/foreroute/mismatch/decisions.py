"""Compares decisions beside routes: how two streams differ, and sampling masks that belong to other tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreroute.errors import BatchMismatchError, SpecMismatchError
from foreroute.trace import SAMPLING, DecisionStream, RoutingTrace
from foreroute.trace.checks import place_of


@dataclass(frozen=True)
class StreamDifference:
    """Differences of the sets of two traces of the same tokens."""

    rows: int  # that have a decision in both
    differing: int  # of those, how many have other sets in at least one layer
    alone: tuple[int, int]  # rows with a decision in the first trace alone, and in the second alone
    first: int | None  # the packed number of the first row that differs, in one of these ways; None where none does
    shared: float  # mean share of the ids of either set that both have, over all sets of the rows; NaN without rows


def stream_difference(a: DecisionStream, b: DecisionStream) -> StreamDifference:
    """Compare two streams of the same rows. A set without ids, which left nothing out, has all choices."""
    if (a.num_choices, a.layers) != (b.num_choices, b.layers):
        raise SpecMismatchError(
            f"one stream has {a.num_choices} choices in {a.depth} layers, the other {b.num_choices} in {b.depth}; "
            "expected streams of one model"
        )
    if a.num_rows != b.num_rows:
        raise BatchMismatchError(f"one stream has {a.num_rows} rows, the other {b.num_rows}; expected the same tokens")
    common = np.intersect1d(a.keys, b.keys, assume_unique=True) // a.num_choices
    shared_ND = np.bincount(common, minlength=a.num_rows * a.depth).reshape(-1, a.depth)
    # a set of all choices shares with another whatever that has
    size_a, size_b = (np.where(each.counts_ND == 0, a.num_choices, each.counts_ND) for each in (a, b))
    shared_ND = np.where(a.counts_ND == 0, size_b, np.where(b.counts_ND == 0, size_a, shared_ND))
    share_ND = shared_ND / (size_a + size_b - shared_ND)
    both_N = a.valid_N & b.valid_N
    differs_N = both_N & (share_ND < 1).any(axis=1)
    rows = np.flatnonzero(differs_N | (a.valid_N ^ b.valid_N))
    return StreamDifference(
        rows=int(both_N.sum()),
        differing=int(differs_N.sum()),
        alone=(int((a.valid_N & ~b.valid_N).sum()), int((b.valid_N & ~a.valid_N).sum())),
        first=int(rows[0]) if len(rows) else None,
        shared=float(share_ND[both_N].mean()) if share_ND[both_N].size else float("nan"),
    )


def misplaced_masks(trace: RoutingTrace) -> str:
    """Say, within a sentence, that sampling masks leave out the tokens that were sampled; "" where none does."""
    masks = trace.streams.get(SAMPLING)
    if masks is None:
        return ""
    # a row is that of the token before the sampled one; the last of a sequence has no token to have sampled
    next_ids_N = np.append(trace.token_ids_N[1:], 0).astype(np.int64)
    next_ids_N[trace.offsets[1:][trace.lengths > 0] - 1] = -1
    wrong_N = masks.valid_N & ~masks.contains(next_ids_N)
    if not wrong_N.any():
        return ""
    sequence, position = place_of(int(wrong_N.argmax()), trace.offsets)
    return (
        f"{int(wrong_N.sum())} of {int(masks.valid_N.sum())} sets leave out the token that was sampled, the first at "
        f"position {position} of sequence {sequence}; they are shifted, of other tokens, or the sampler drew from "
        "other sets than it kept"
    )
