"""Cutting sequences into micro-batches under a token budget."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import BatchMismatchError


def by_token_budget(lengths: ArrayLike, budget: int) -> list[NDArray[np.int64]]:
    """Consecutive sequences whose padded size (sequences times longest) stays within a budget.

    Args:
        lengths: integers [S], tokens per sequence.
        budget: slots that one micro-batch may have, padding included.

    Returns:
        One int64 array of sequence numbers per micro-batch; joined they are 0 .. S - 1.

    Raises:
        BatchMismatchError: when a single sequence exceeds the budget.
    """
    sizes = np.asarray(lengths, dtype=np.int64).reshape(-1)
    if sizes.size and sizes.max() > budget:
        raise BatchMismatchError(
            f"sequence {int(sizes.argmax())} has {int(sizes.max())} tokens, the budget of a micro-batch is {budget}; "
            "raise the budget or shorten the sequence"
        )
    batches: list[NDArray[np.int64]] = []
    start, longest = 0, 0
    for sequence, size in enumerate(sizes.tolist()):
        longest = max(longest, size)
        if (sequence + 1 - start) * longest > budget:
            batches.append(np.arange(start, sequence))
            start, longest = sequence, size
    if len(sizes):
        batches.append(np.arange(start, len(sizes)))
    return batches
