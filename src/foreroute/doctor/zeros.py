"""Log-probs of exactly 0: those that nobody filled in, told by the other side from those of sure tokens. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

DENIED, SHARE_DENIED = 4, 0.05
"""Log-probs of exactly 0 that the other side denies, by a probability below one half: how many it takes in a stretch of
zeros, and which part of it. Float32 rounds many of a peaked policy to 0, and the other side has nearly 0 there too.
Where top-p leaves one token to draw from, the other side gives it that much: one half and more, as top-p is set."""

BEGIN, SHARE_OF_BEGINNINGS, SHARE_OF_OTHERS = 6, 0.2, 0.1
"""Zeros of both sides with which sequences begin on average where prompts were marked: more than most templates make
sure, a part of all tokens, and at most a part of the others, which a peaked policy exceeds."""


@dataclass(frozen=True, eq=False)
class Zeros:
    """Log-probs of exactly 0, probability 1, that the other side denies."""

    side: str  # whose they are, as the subject of a sentence
    other: str  # the other side
    sequences: list[int] | None  # that have them; None where sequences are not known
    count: int  # how many zeros there are
    mean: float  # what the other side has in the place of the zeros, on average
    zero_R: NDArray[np.bool_]  # which tokens they are


def denied_zeros(
    side: str, other: str, own_R: NDArray[Any], other_R: NDArray[Any], lengths_S: NDArray[np.integer] | None
) -> Zeros | None:
    """Find the stretches of zeros of one side in which the other denies too many for a rounding to be the cause."""
    zero_R, lengths = np.asarray(own_R) == 0, [len(own_R)] if lengths_S is None else lengths_S
    sequence_R = np.repeat(np.arange(len(lengths)), lengths)
    # a stretch ends with its sequence: what fills in log-probs works by sequences
    begins_R = np.diff(zero_R, prepend=False) | (np.diff(sequence_R, prepend=0) > 0)
    stretch_R = np.cumsum(begins_R)
    denied_R = zero_R & (np.asarray(other_R) < -math.log(2))
    zeros, denied = (np.bincount(stretch_R, each) for each in (zero_R, denied_R))
    whole = np.zeros(len(zeros), np.bool_)  # sequences of zeros, which may be short
    whole[stretch_R] = zeros[stretch_R] == np.asarray(lengths)[sequence_R]
    # a rounded log-prob near 0 is denied by nobody, one that was never filled in by most
    chosen = (denied >= SHARE_DENIED * zeros) & ((denied >= DENIED) | whole & (denied > 0))
    if denied[chosen].sum() < DENIED:  # a few tokens of a peaked policy, one of them far off
        return None
    zero_R &= chosen[stretch_R]
    sequences = None if lengths_S is None else np.unique(sequence_R[zero_R]).tolist()
    mean = float(np.asarray(other_R)[zero_R].mean())
    return Zeros(side, other, sequences, int(zero_R.sum()), mean, zero_R)


def shared_beginnings(
    own_R: NDArray[Any], other_R: NDArray[Any], lengths_S: NDArray[np.integer]
) -> NDArray[np.integer] | None:
    """Count the zeros of both sides that each sequence begins with, [S], where they are many and others few."""
    zero_R = (np.asarray(own_R) == 0) & (np.asarray(other_R) == 0)
    parts = [each for each in np.split(zero_R, np.cumsum(lengths_S)[:-1]) if len(each)]
    counts = np.array([len(each) if each.all() else int(each.argmin()) for each in parts])
    # padding behind the last token may be marked as well
    others = np.concatenate([np.trim_zeros(~each) for each in parts]) if parts else zero_R
    is_unscored = (
        len(counts)
        and counts.min() > 0
        and counts.mean() >= BEGIN
        and counts.sum() >= SHARE_OF_BEGINNINGS * len(zero_R)
    )
    return counts if is_unscored and (~others).sum() < SHARE_OF_OTHERS * len(others) else None
