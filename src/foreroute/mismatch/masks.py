"""Sampling masks that are not those of their tokens, and two streams of decisions side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import BatchMismatchError, SpecMismatchError
from foreroute.trace import SAMPLING, DecisionStream, RoutingTrace

MOST_SHIFT, MOST_SEQUENCES = 4, 256
"""How far sets are looked for at other rows, and among how many sequences they are looked for."""
LEAST_ROWS = 4
"""Sets that must fit other tokens before that is believed: a few large sets fit many tokens."""


@dataclass(frozen=True)
class StreamDifference:
    """How the sets of two traces of the same tokens differ.

    Attributes:
        rows: that have a decision in both.
        differing: of those, how many have other sets in at least one layer.
        alone: rows with a decision in the first trace alone, and in the second alone.
        first: the packed number of the first row that differs, in one of these ways; None where none does.
        shared: mean share of the ids of either set that both have, over all sets of the rows; NaN without rows.
    """

    rows: int
    differing: int
    alone: tuple[int, int]
    first: int | None
    shared: float


def stream_difference(a: DecisionStream, b: DecisionStream) -> StreamDifference:
    """Compare two streams of the same rows. A set without ids, which left nothing out, has all choices.

    Raises:
        SpecMismatchError: when they are not of one model.
        BatchMismatchError: when they have other numbers of rows.
    """
    if (a.num_choices, a.layers) != (b.num_choices, b.layers):
        raise SpecMismatchError(
            f"one stream has {a.num_choices} choices in {a.depth} layers, the other {b.num_choices} in {b.depth}; "
            "expected streams of one model"
        )
    if a.num_rows != b.num_rows:
        raise BatchMismatchError(f"one stream has {a.num_rows} rows, the other {b.num_rows}; expected the same tokens")
    both_N = a.valid_N & b.valid_N
    of_a, of_b = (np.repeat(np.arange(len(s.offsets) - 1), np.diff(s.offsets)) * s.num_choices + s.ids for s in (a, b))
    common = np.intersect1d(of_a, of_b, assume_unique=True) // a.num_choices
    shared_ND = np.bincount(common, minlength=a.num_rows * a.depth).reshape(-1, a.depth)
    sizes = [np.where(s.counts_ND == 0, s.num_choices, s.counts_ND) for s in (a, b)]
    whole = [s.counts_ND == 0 for s in (a, b)]
    shared_ND = np.where(whole[0], sizes[1], np.where(whole[1], sizes[0], shared_ND))
    of_either = sizes[0] + sizes[1] - shared_ND
    differs_N = both_N & (shared_ND < of_either).any(axis=1)
    alone = [a.valid_N & ~b.valid_N, b.valid_N & ~a.valid_N]
    rows = np.flatnonzero(differs_N | alone[0] | alone[1])
    share_ND = (shared_ND / of_either)[both_N]
    return StreamDifference(
        rows=int(both_N.sum()),
        differing=int(differs_N.sum()),
        alone=(int(alone[0].sum()), int(alone[1].sum())),
        first=int(rows[0]) if len(rows) else None,
        shared=float(share_ND.mean()) if share_ND.size else float("nan"),
    )


def misplaced_masks(trace: RoutingTrace) -> str:
    """Say why sampling masks leave out the tokens that were sampled.

    Returns:
        A sentence in the middle, which names rows or sequences that the sets fit instead, where there are such; empty
        when every set has its token, or the trace has none.
    """
    masks = trace.streams.get(SAMPLING)
    if masks is None:
        return ""
    wrong_N = masks.valid_N & ~masks.contains(_later(trace, 1))
    if not wrong_N.any():
        return ""
    row = int(wrong_N.argmax())
    sequence = int(np.searchsorted(trace.offsets, row, side="right") - 1)
    seen = (
        f"{int(wrong_N.sum())} of {int(masks.valid_N.sum())} sets leave out the token that was sampled, the first at "
        f"position {row - int(trace.offsets[sequence])} of sequence {sequence}"
    )
    for shift in sorted(range(-MOST_SHIFT, MOST_SHIFT + 1), key=abs):
        tokens_N = _later(trace, 1 + shift)
        looked_at = masks.valid_N & (tokens_N >= 0)
        if shift and looked_at.sum() >= LEAST_ROWS and masks.contains(tokens_N)[looked_at].all():
            away = f"{abs(shift)} token{'' if abs(shift) == 1 else 's'} {'later' if shift > 0 else 'earlier'}"
            return f"{seen}; each is the set of the token {away}"
    fits = _fitting_sequence(trace, masks, sequence)
    if fits is not None:
        return f"{seen}; the sets of sequence {sequence} fit the tokens of sequence {fits}"
    return f"{seen}; they are of other tokens, or the sampler drew from other sets than it kept"


def _later(trace: RoutingTrace, distance: int) -> NDArray[np.int64]:
    """int64 [N], the token so many positions behind each row, and -1 past either end of its sequence."""
    rows = np.arange(trace.num_rows) + distance
    starts, ends = (np.repeat(bounds, trace.lengths) for bounds in (trace.offsets[:-1], trace.offsets[1:]))
    inside = (rows >= starts) & (rows < ends)
    return np.where(inside, trace.token_ids_N[np.where(inside, rows, 0)], -1).astype(np.int64)


def _fitting_sequence(trace: RoutingTrace, masks: DecisionStream, sequence: int) -> int | None:
    """Another sequence whose sampled tokens are in the sets of this one, one by one."""

    def rows_of(s: int) -> NDArray[np.int64]:
        first, end = trace.offsets[s : s + 2]
        return np.flatnonzero(masks.valid_N[first:end]) + int(first)

    own = masks.take(rows_of(sequence))
    next_N = _later(trace, 1)
    for other in range(min(len(trace), MOST_SEQUENCES)):
        rows = rows_of(other)
        if other != sequence and len(rows) == own.num_rows >= LEAST_ROWS and own.contains(next_N[rows]).all():
            return other
    return None
