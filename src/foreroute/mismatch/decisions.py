"""Decisions beside routes: how two streams differ, and sets that belong to other tokens or layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import BatchMismatchError, SpecMismatchError
from foreroute.trace import INDEXER, SAMPLING, DecisionStream, RoutingTrace
from foreroute.trace.checks import take_ranges

MOST_SHIFT, MOST_ROWS = 4, 256
"""How far sets are looked for at other tokens and layers, and for how many rows."""
LEAST_ROWS = 4
"""Masks that must fit other tokens before that is believed: a few large sets fit many tokens."""
NEARER = 2.0
"""Factor by which choices must share more in one place than in another, in ids that are not shared, to tell the two
apart. Chosen by hand: choices last from token to token, so that those of the next token are nearly as near as those of
another precision."""


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
    every = np.arange(a.num_rows * a.depth)
    shared_ND, *counts = (each.reshape(-1, a.depth) for each in _shared_ids(a, every, b, every))
    # a set of all choices shares with another whatever that has
    size_a, size_b = (np.where(count_ND == 0, a.num_choices, count_ND) for count_ND in counts)
    shared_ND = np.where(counts[0] == 0, size_b, np.where(counts[1] == 0, size_a, shared_ND))
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
    """Say why sampling masks leave out the tokens that were sampled.

    Returns:
        A sentence in the middle, which names the tokens that the sets fit instead, where there are such; empty when
        every set has its token, or the trace has none.
    """
    masks = trace.streams.get(SAMPLING)
    if masks is None:
        return ""
    wrong_N = masks.valid_N & ~masks.contains(_tokens_ahead(trace, 1))
    if not wrong_N.any():
        return ""
    row = int(wrong_N.argmax())
    sequence = int(np.searchsorted(trace.offsets, row, side="right") - 1)
    seen = (
        f"{int(wrong_N.sum())} of {int(masks.valid_N.sum())} sets leave out the token that was sampled, the first at "
        f"position {row - int(trace.offsets[sequence])} of sequence {sequence}"
    )
    for shift in _shifts():
        tokens_N = _tokens_ahead(trace, 1 + shift)
        looked_at = masks.valid_N & (tokens_N >= 0)
        if looked_at.sum() >= LEAST_ROWS and masks.contains(tokens_N)[looked_at].all():
            away = f"{abs(shift)} token{'' if abs(shift) == 1 else 's'} {'later' if shift > 0 else 'earlier'}"
            return f"{seen}; each is the set of the token {away}"
    return f"{seen}; they are of other tokens, or the sampler drew from other sets than it kept"


def misplaced_choices(own: RoutingTrace, other: RoutingTrace) -> str:
    """Say where choices of indexers belong that are not those of their rows.

    Args:
        own: the reference, such as the trainer's own trace.
        other: a trace of the same tokens.

    Returns:
        A sentence in the middle, which names the token or layer that they fit instead; empty when there is no such, or
        not both traces have choices of the same indexers.
    """
    mine, theirs = own.streams.get(INDEXER), other.streams.get(INDEXER)
    if mine is None or theirs is None or (mine.layers, mine.num_rows) != (theirs.layers, theirs.num_rows):
        return ""
    rows = np.flatnonzero(mine.counts_ND.any(axis=1))
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, MOST_ROWS).astype(np.int64))] if len(rows) else rows
    kept = _sets(mine, rows)
    here = _share(mine, kept, theirs, kept)
    if np.isnan(here) or here == 1:
        return ""
    found = {"": here}
    sequence = np.searchsorted(own.offsets, rows, side="right") - 1
    for shift in _shifts():
        moved = rows + shift
        inside = (moved >= own.offsets[sequence]) & (moved < own.offsets[sequence + 1])
        # what stands at the row behind belongs to the token before it
        name = f"the token {abs(shift)} {'earlier' if shift > 0 else 'later'}"
        found[name] = _share(mine, kept, theirs, _sets(theirs, np.where(inside, moved, -1)))
        if abs(shift) < mine.depth:
            name = f"the layer {abs(shift)} {'before' if shift > 0 else 'after'}"
            found[name] = _share(mine, kept, theirs, _sets(theirs, rows, layers=shift))
    least = 1 - np.nanmax(list(found.values()))
    where = next(name for name, share in found.items() if 1 - share <= NEARER * least)  # the nearest comes first
    if (1 - found[where]) * NEARER >= 1 - here:
        return ""
    return f"choices share {here:.0%} of their ids with the reference, and {found[where]:.0%} with {where}"


def _shifts() -> Iterator[int]:
    """1, -1, 2, -2 and so on."""
    return (by * side for by in range(1, MOST_SHIFT + 1) for side in (1, -1))


def _tokens_ahead(trace: RoutingTrace, distance: int) -> NDArray[np.int64]:
    """int64 [N], the token so many positions behind each row, and -1 past either end of its sequence."""
    position_N = trace.positions_N + distance
    inside_N = (position_N >= 0) & (position_N < np.repeat(trace.lengths, trace.lengths))
    return np.where(inside_N, np.roll(trace.token_ids_N, -distance), -1).astype(np.int64)


def _sets(stream: DecisionStream, rows: NDArray[np.int64], *, layers: int = 0) -> NDArray[np.int64]:
    """The numbers of the sets of rows, so many layers further on; -1 where there is no such row (-1) or layer."""
    layer_D = np.arange(stream.depth) + layers
    there = (rows >= 0)[:, None] & (layer_D >= 0) & (layer_D < stream.depth)
    return np.where(there, rows[:, None] * stream.depth + layer_D, -1).reshape(-1)


def _share(a: DecisionStream, sets_a: NDArray[np.int64], b: DecisionStream, sets_b: NDArray[np.int64]) -> float:
    """Mean share of the ids of either set that both have, over pairs of sets that both have some; NaN without any."""
    common, count_a, count_b = _shared_ids(a, sets_a, b, sets_b)
    both = (count_a > 0) & (count_b > 0)
    return float((common[both] / (count_a + count_b - common)[both]).mean()) if both.any() else float("nan")


def _shared_ids(
    a: DecisionStream, sets_a: NDArray[np.int64], b: DecisionStream, sets_b: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """How many ids pairs of sets have in common, and each set has. A set is row times D plus layer; -1 has no ids."""

    def numbered(stream: DecisionStream, sets_X: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids, numbered so that those of different pairs differ, and how many each set has."""
        count_X = np.where(sets_X < 0, 0, np.diff(stream.offsets)[sets_X])
        ids = take_ranges(stream.ids, stream.offsets[:-1][sets_X], count_X)
        return np.repeat(np.arange(len(sets_X)), count_X) * stream.num_choices + ids, count_X

    (ids_a, count_a), (ids_b, count_b) = numbered(a, sets_a), numbered(b, sets_b)
    common = np.intersect1d(ids_a, ids_b, assume_unique=True) // a.num_choices
    return np.bincount(common, minlength=len(sets_a)), count_a, count_b
