"""Where a file is cut: blocks of stored rows that begin with a sequence, so that whole sequences are read alone.

Block b holds the rows `block_starts[b]:block_starts[b + 1]`: their tokens, their validity, and per layer one payload
with the routed ones among them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreroute.trace.check import as_offsets
from foreroute.trace.spec import RoutingSpec

ROWS_PER_EXPERT = 16
LEAST_ROWS, MOST_ROWS = 1024, 8192


def cut_blocks(stored_S: NDArray[np.int64], spec: RoutingSpec) -> NDArray[np.int64]:
    """First stored row of each block, and the number of stored rows at the end: int64 [B + 1].

    A block aims at 16 rows per expert, from 1,024 to 8,192: fewer make the ranking of experts dear, more make it blunt.
    It takes sequences until it has three quarters of that. A sequence of twice as much has blocks of its own.

    Args:
        stored_S: int64 [S], the rows that each sequence stores.
        spec: the model.
    """
    aim = min(max(ROWS_PER_EXPERT * spec.num_experts, LEAST_ROWS), MOST_ROWS)
    cuts, filled, end = [0], 0, 0
    for rows in stored_S.tolist():
        if filled and filled + rows > 2 * aim:
            cuts.append(end)
            filled = 0
        pieces = max(1, round(rows / aim)) if rows > 2 * aim else 1
        cuts.extend((end + as_offsets(_even(rows, pieces))[1:-1]).tolist())
        end += rows
        filled = filled + rows if pieces == 1 else aim
        if 4 * filled >= 3 * aim:
            cuts.append(end)
            filled = 0
    return np.array(cuts if cuts[-1] == end else [*cuts, end], np.int64)


def needed_blocks(
    block_starts: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The blocks that runs of stored rows touch, and where each run starts among the rows of those blocks, joined."""
    first = np.searchsorted(block_starts, starts, side="right") - 1
    after = np.searchsorted(block_starts, starts + lengths, side="left")
    change = np.zeros(len(block_starts), np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, after, -1)
    blocks = np.flatnonzero(np.cumsum(change)[:-1] > 0)
    compact = as_offsets(np.diff(block_starts)[blocks])
    before = compact[np.searchsorted(blocks, first)] - block_starts[first]
    return blocks, starts + before


def _even(total: int, parts: int) -> NDArray[np.int64]:
    return np.full(parts, total // parts) + (np.arange(parts) < total % parts)
