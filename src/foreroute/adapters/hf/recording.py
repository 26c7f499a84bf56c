"""What a Hugging Face model recorded: the rows of each forward that are no padding, and were not taken back.

Letters: B rows of a batch of T positions, R = B · T, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from foreroute.adapters.hf.forward_tokens import ForwardTokens
from foreroute.adapters.hf.pixels import pixel_stream, warn_of_unbound
from foreroute.replay import ForwardRows, RecordedPass
from foreroute.replay.rows import to_host
from foreroute.trace import INDEXER, PIXELS

if TYPE_CHECKING:
    from foreroute.adapters.hf.indexers import FoundIndexers


def rows_of_passes(passes: Sequence[RecordedPass], indexers: FoundIndexers | None) -> list[ForwardRows]:
    """Give the rows of forwards one after the other, of which those that were taken back are left out."""
    widths = _kept_widths([each.args for each in passes])
    return [_rows_of_pass(each, width, indexers) for each, width in zip(passes, widths, strict=True) if width]


def _rows_of_pass(recorded: RecordedPass, width: int, indexers: FoundIndexers | None) -> ForwardRows:
    """Give the rows of its first positions, of which `width` are left."""
    batch: ForwardTokens = recorded.args
    ids_BT, kept_BT, starts_BT = batch.on_host()
    kept_BT = kept_BT & (np.arange(kept_BT.shape[1]) < width)
    kept_R = kept_BT.reshape(-1)

    def packed(of_rows: Tensor | None) -> Any:
        return None if of_rows is None else of_rows.cpu().numpy().swapaxes(0, 1)[kept_R]

    if starts_BT is None:
        lengths_S = np.asarray(kept_BT.sum(axis=1))
    else:
        lengths_S = np.diff(np.flatnonzero(starts_BT[kept_BT]), append=kept_BT.sum())
    streams = {}
    digests_BT = None if batch.digests_BT is None else to_host(batch.digests_BT)
    if digests_BT is not None:
        streams[PIXELS] = pixel_stream(digests_BT[kept_BT])
    warn_of_unbound(batch.pixel_names, digests_BT)
    if recorded.choices is not None and indexers is not None:
        streams[INDEXER] = indexers.stream(recorded.choices, lengths_S, kept_BT, batch)
    return ForwardRows(
        lengths_S,
        ids_BT[kept_BT],
        packed(recorded.ids_LRK),
        packed(recorded.values_LR),
        batch.past,
        width if starts_BT is None else None,
        streams,
    )


def _kept_widths(batches: Sequence[ForwardTokens]) -> list[int]:
    """Count the positions of each forward of a recording that are still there behind the last that continues it."""
    # the others were cut off at the end of the cache, as drafts that were rejected, and later forwards took their place
    widths = [batch.shape[1] for batch in batches]
    grown: list[int] = []  # forwards of the sequences that grow now, of which something is left
    for number, batch in enumerate(batches):
        if not batch.past:
            grown = []
        while grown and batch.cache_was_seen and batches[grown[-1]].past + widths[grown[-1]] > batch.past:
            last = grown[-1]
            widths[last] = max(0, batch.past - batches[last].past)
            if not widths[last]:
                grown.pop()
        grown.append(number)
    return widths
