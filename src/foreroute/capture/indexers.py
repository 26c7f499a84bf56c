"""Choices of sparse-attention indexers as SGLang returns them, on the rows of a trace.

SGLang (0.5.23, by its source) answers `return_indexer_topk` with `meta_info["indexer_topk"]`: int32 [T - 1, layers,
top-k] in base64, without a shape, with -1 where a query chose less. Layers that share the choice of another have a copy
of it. With its fused transform on, which is the default, ids may be those of the key-value pool, which mean nothing to
anybody else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.arrays import columns_of, is_array, read_rows
from foreroute.errors import CaptureError, TraceContentError, shown
from foreroute.trace import INDEXER, DecisionStream, IndexerSpec, RoutingTrace

UNFUSED = "start the server with SGLANG_DSA_FUSE_TOPK=0, if its ids are those of the key-value pool"


def with_indexer_choices(trace: RoutingTrace, returned: Sequence[Any], indexers: IndexerSpec | None) -> RoutingTrace:
    """Add the choices of indexers that an engine returned beside routes.

    Args:
        trace: of S sequences, each with its last token.
        returned: of each sequence, int32 [T - 1, layers, k] with -1 where a query chose less, as an array or its bytes
            in base64. Layers are those with an indexer, or all decoder layers. Ids are units of `indexers`.
        indexers: of the model, with one head, such as `hf.attach(model).indexers`. None where they are not known.

    Raises:
        CaptureError: when the indexers are not known, or the choices cannot be those of the sequences.
    """
    if not isinstance(indexers, IndexerSpec) or indexers.heads != 1 or not indexers.layers:
        raise CaptureError(
            f"there are choices of sparse-attention indexers, and indexers are {shown(indexers)}; expected an "
            "IndexerSpec of one head, with a layer or more: pass indexers=hf.attach(model).indexers, or take "
            "indexer_topk out of the output"
        )
    if len(returned) != len(trace):
        raise CaptureError(f"got choices of {len(returned)} sequences for {len(trace)}; expected one array for each")
    lengths = trace.lengths.tolist()
    chosen = [np.zeros((0, len(indexers.layers), indexers.top_k), np.int32)]  # for a trace of no sequences
    chosen += [_of_layers(each, s, n, indexers) for s, (each, n) in enumerate(zip(returned, lengths, strict=True))]

    def by_layer() -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
        for layer in range(len(indexers.layers)):
            rows = [np.sort(each_RDk[:, layer], axis=1) for each_RDk in chosen]
            counts = np.concatenate([(row >= 0).sum(axis=1) for row in rows])
            yield counts, np.concatenate([row[row >= 0] for row in rows])

    # streams are made of the rows that chose, and then moved to those of the trace, where each last token has none
    position_N, is_chosen_N = trace.positions_N, trace.positions_N < np.repeat(trace.lengths - 1, trace.lengths)
    place_N = np.where(is_chosen_N, np.cumsum(is_chosen_N) - 1, -1)
    try:
        stream: DecisionStream = indexers.stream(position_N[is_chosen_N], by_layer()).take(place_N)
        indexers.check(stream, trace.offsets)
    except TraceContentError as error:
        raise CaptureError(f"these are no choices of the sequences ({error}); {UNFUSED}") from error
    return trace.with_stream(INDEXER, stream)


def _of_layers(returned: Any, sequence: int, length: int, indexers: IndexerSpec) -> NDArray[np.int32]:
    """Return the choices of one sequence in the layers with an indexer, int32 [T - 1, D, k]."""
    rows, what = max(0, length - 1), f"the choices of sequence {sequence}"
    if not isinstance(returned, str) and not is_array(returned):
        raise CaptureError(f"{what} are {shown(returned)}; expected base64 of int32, or an array")
    array = read_rows(returned, rows, indexers.top_k, what)
    if len(array) != rows:
        raise CaptureError(f"{what} have {len(array)} rows; expected {rows}, one for each token but the last")
    if not rows:
        return np.zeros((0, len(indexers.layers), indexers.top_k), np.int32)
    if array.size and (array.min() < -1 or array.max() >= length):
        raise CaptureError(
            f"{what} go from {array.min()} to {array.max()}; expected units of a sequence of {length} tokens, or -1; "
            f"{UNFUSED}"
        )
    return array[:, columns_of(indexers.layers, array.shape[1], what)].astype(np.int32, copy=False)
