"""Choices of indexers that belong elsewhere: to other tokens, to another layer, or to another sequence."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreroute.trace import INDEXER, DecisionStream, RoutingTrace

MOST_SHIFT, MOST_SEQUENCES, MOST_ROWS = 4, 256, 256
"""How far choices are looked for at other tokens and layers, among how many sequences, and of how many rows."""
NEARER = 2.0
"""Factor by which ids that are not shared must be fewer in one place than in another to tell the two apart. Chosen by
hand: choices last from token to token, so that those of the next token are nearly as near as those of another
precision."""


def misplaced_choices(own: RoutingTrace, other: RoutingTrace) -> str:
    """Say where choices of indexers belong that are not those of their rows.

    Args:
        own: the reference, such as the trainer's own trace.
        other: a trace of the same tokens.

    Returns:
        A sentence in the middle, which names the tokens, layers or sequence that they fit instead; empty when there is
        no such, or not both traces have choices of the same indexers.
    """
    mine, theirs = own.streams.get(INDEXER), other.streams.get(INDEXER)
    if mine is None or theirs is None or (mine.layers, mine.num_rows) != (theirs.layers, theirs.num_rows):
        return ""
    rows = np.flatnonzero(mine.counts_ND.any(axis=1))
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, MOST_ROWS).astype(np.int64))] if len(rows) else rows
    kept = mine.take(rows)
    here = _shared(kept, theirs.take(rows))
    if np.isnan(here) or here == 1:
        return ""
    found = {"": here} | _of_tokens(kept, theirs, rows, own.offsets)
    for by in range(1, min(MOST_SHIFT, mine.depth - 1) + 1):
        for side, word in ((by, "before"), (-by, "after")):
            found[f"the layer {by} {word}"] = _shared(kept, theirs.take(rows), layers=side)
    least = 1 - np.nanmax(list(found.values()))
    where = next(name for name, share in found.items() if 1 - share <= NEARER * least)  # the nearest comes first
    if (1 - found[where]) * NEARER < 1 - here:
        return f"choices share {here:.0%} of their ids with the reference, and {found[where]:.0%} with {where}"
    return _of_sequence(mine, theirs, rows, own.offsets)


def _of_tokens(
    kept: DecisionStream, theirs: DecisionStream, rows: NDArray[np.int64], offsets: NDArray[np.int64]
) -> dict[str, float]:
    """The share of ids with the choices of tokens nearby."""
    sequence = np.searchsorted(offsets, rows, side="right") - 1
    found = {}
    for shift in (by * side for by in range(1, MOST_SHIFT + 1) for side in (1, -1)):
        moved = rows + shift
        inside = (moved >= offsets[sequence]) & (moved < offsets[sequence + 1])
        # what stands at the row behind belongs to the token before it
        name = f"the token {abs(shift)} {'earlier' if shift > 0 else 'later'}"
        found[name] = _shared(kept, theirs.take(np.where(inside, moved, -1)))
    return found


def _of_sequence(
    mine: DecisionStream, theirs: DecisionStream, rows: NDArray[np.int64], offsets: NDArray[np.int64]
) -> str:
    """Whether the choices of the sequence that is furthest off are those of another sequence."""
    sequence = np.searchsorted(offsets, rows, side="right") - 1
    shares = {int(s): _shared(mine.take(rows[sequence == s]), theirs.take(rows[sequence == s])) for s in set(sequence)}
    worst = min(shares, key=lambda s: np.nan_to_num(shares[s], nan=1.0))
    own = rows[sequence == worst]
    for other in range(min(len(offsets) - 1, MOST_SEQUENCES)):
        moved = own - offsets[worst] + offsets[other]
        moved = np.where(moved < offsets[other + 1], moved, -1)
        share = _shared(mine.take(moved), theirs.take(own))
        if other != worst and (1 - share) * NEARER < 1 - shares[worst]:
            return (
                f"choices of sequence {worst} share {shares[worst]:.0%} of their ids with the reference, and "
                f"{share:.0%} with those of its sequence {other}"
            )
    return ""


def _shared(a: DecisionStream, b: DecisionStream, *, layers: int = 0) -> float:
    """Mean share of the ids of either set that both have, over rows and layers in which both have some.

    Args:
        a: R rows.
        b: R rows.
        layers: how many layers before its own a set of `b` is compared with.

    Returns:
        NaN where nothing is left to compare.
    """
    depth = a.depth
    moved = np.arange(a.num_rows * depth) - layers
    inside = moved // depth == np.arange(len(moved)) // depth  # Python's floor: -1 is in no row
    counts_a, counts_b = np.diff(a.offsets), np.diff(b.offsets)
    kept = np.repeat(inside, counts_b)
    of_a = np.repeat(np.arange(len(moved)), counts_a) * a.num_choices + a.ids
    of_b = (np.repeat(moved, counts_b) * b.num_choices + b.ids)[kept]
    common = np.bincount(np.intersect1d(of_a, of_b, assume_unique=True) // a.num_choices, minlength=len(moved))
    there = np.zeros(len(moved), np.int64)
    there[moved[inside]] = counts_b[inside]
    both = (counts_a > 0) & (there > 0)
    return float((common / (counts_a + there - common).clip(1))[both].mean()) if both.any() else float("nan")
