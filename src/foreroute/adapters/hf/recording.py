"""What a Hugging Face model recorded: the rows of each forward that are no padding.

Letters: B rows of a batch of T positions, R = B · T, S sequences.
"""

from __future__ import annotations

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


def rows_of_pass(recorded: RecordedPass, indexers: FoundIndexers | None) -> ForwardRows:
    """Give the rows of one forward."""
    batch: ForwardTokens = recorded.args
    ids_BT, kept_BT, starts_BT = batch.on_host()
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
        kept_BT.shape[1] if starts_BT is None else None,
        streams,
    )
