"""Choices of sparse-attention indexers as SGLang returns them, on the rows of a trace.

SGLang (0.5.23, by its source) answers `return_indexer_topk` with `meta_info["indexer_topk"]`: int32 [T - 1, layers,
top-k] in base64, without a shape. Layers that share the choice of another have a copy of it. With its fused transform
on, which is the default, ids may be those of the key-value pool, which mean nothing to anybody else.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.model_facts import ModelFacts
from foreroute.capture.recognition import RawSequence, is_array, read_array, shown
from foreroute.errors import CaptureError, TraceContentError
from foreroute.trace import INDEXER, DecisionStream, IndexerSpec, RoutingTrace

UNFUSED = "start the server with SGLANG_DSA_FUSE_TOPK=0, if its ids are those of the key-value pool"


def with_indexer_choices(
    trace: RoutingTrace, returned: Sequence[str | NDArray[np.int32]], indexers: IndexerSpec, *, num_layers: int
) -> RoutingTrace:
    """Add the choices of indexers that an engine returned beside routes.

    Args:
        trace: of S sequences, each with its last token.
        returned: of each sequence, int32 [T - 1, `num_layers`, k] with -1 where a query chose less, as an array or its
            bytes in base64. Units are those of `indexers`: tokens, or compressed entries.
        indexers: of the model, such as `hf.attach(model).indexers`; with one head.
        num_layers: that the engine returns: all decoder layers, or those with an indexer alone.

    Raises:
        CaptureError: when the choices cannot be those of the sequences, with what to ask the engine for.
    """
    if len(returned) != len(trace):
        raise CaptureError(f"got choices of {len(returned)} sequences for {len(trace)}; expected one array for each")
    numbers = [layer.index for layer in indexers.layers]
    columns = list(range(len(numbers))) if num_layers == len(numbers) else numbers
    if indexers.heads != 1 or max(columns, default=num_layers) >= num_layers:
        raise CaptureError(
            f"the engine returns {num_layers} layers, and the model has indexers of {indexers.heads} heads in layers "
            f"{numbers[:8]}; expected indexers of one head, and all layers of the model or those alone"
        )
    arrays = [
        _array(each, s, int(n), num_layers) for s, (each, n) in enumerate(zip(returned, trace.lengths, strict=True))
    ]
    position_N = np.concatenate([np.arange(len(each)) for each in arrays])

    def chosen() -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
        for column in columns:
            rows = [each[:, column] for each in arrays]
            counts = np.concatenate([(row >= 0).sum(axis=1) for row in rows])
            ascending = [np.sort(row, axis=1) for row in rows]
            yield counts, np.concatenate([row[row >= 0] for row in ascending])

    recorded = np.concatenate([np.arange(a, a + len(each)) for a, each in zip(trace.offsets, arrays, strict=False)])
    place_N = np.full(trace.num_rows, -1)
    place_N[recorded] = np.arange(len(recorded))
    try:
        stream: DecisionStream = indexers.stream(position_N, chosen()).take(place_N)
        indexers.check(stream, trace.offsets)
    except TraceContentError as error:
        raise CaptureError(f"these are no choices of the sequences ({error}); {UNFUSED}") from error
    return trace.with_stream(INDEXER, stream)


def decode_choices(trace: RoutingTrace, sequences: Sequence[RawSequence], facts: ModelFacts) -> RoutingTrace:
    """Add the choices that an engine's output has beside routes; the trace as it is where no sequence has any.

    Args:
        trace: of the sequences.
        sequences: as they were found.
        facts: of the model.

    Raises:
        CaptureError: when some sequences have choices and others do not, the indexers are not known, or as
            `with_indexer_choices`.
    """
    returned = [raw.indexer_topk for raw in sequences]
    there = [each is not None for each in returned]
    if not any(there):
        return trace
    if not all(there):
        raise CaptureError(
            f"sequence {there.index(False)} has no choices of indexers and others have; ask for all of them"
        )
    if facts.indexers is None:
        raise CaptureError(
            "the output has choices of sparse-attention indexers, and those of the model are not known; pass "
            "model=ModelFacts(spec, indexers=hf.attach(model).indexers), or take indexer_topk out of the output"
        )
    held = [_held(each, sequence) for sequence, each in enumerate(returned)]
    return with_indexer_choices(trace, held, facts.indexers, num_layers=_num_layers(held, trace, facts.indexers, facts))


def _held(returned: Any, sequence: int) -> str | NDArray[Any]:
    if isinstance(returned, str):
        return returned
    if not is_array(returned):
        raise CaptureError(
            f"the choices of sequence {sequence} are {shown(returned)}; expected base64 of int32, or an array"
        )
    return read_array(returned, f"the choices of sequence {sequence}")


def _num_layers(
    held: Sequence[str | NDArray[Any]], trace: RoutingTrace, indexers: IndexerSpec, facts: ModelFacts
) -> int:
    """Tell by the size, as text has no shape: all layers, or those with an indexer alone."""
    own = len(indexers.layers)
    rows = (trace.lengths - 1).clip(0).tolist()
    alone = all(
        len(each) * 3 // 16 == n * own * indexers.top_k if isinstance(each, str) else each.shape[1:2] == (own,)
        for each, n in zip(held, rows, strict=True)
    )
    return own if alone else facts.num_hidden_layers or own


def _array(returned: str | NDArray[np.int32], sequence: int, length: int, num_layers: int) -> NDArray[np.int32]:
    """int32 [T - 1, layers, k] of one sequence of `length` tokens."""
    rows = max(0, length - 1)
    if isinstance(returned, str):
        try:
            flat = np.frombuffer(base64.b64decode(returned, validate=True), "<i4")
        except (binascii.Error, ValueError) as error:
            raise CaptureError(f"the choices of sequence {sequence} are no base64 of int32 ({error})") from error
        if flat.size % (rows * num_layers) if rows else flat.size:
            raise CaptureError(
                f"the choices of sequence {sequence} are {flat.size} numbers; expected a multiple of {rows} rows x "
                f"{num_layers} layers"
            )
        returned = flat.reshape(rows, num_layers, -1) if flat.size else np.zeros((rows, num_layers, 0), np.int32)
    array = np.asarray(returned)
    if array.dtype.kind not in "iu" or array.ndim != 3 or array.shape[:2] != (rows, num_layers):
        raise CaptureError(
            f"the choices of sequence {sequence} are {array.dtype} of shape {array.shape}; expected integers "
            f"[{rows}, {num_layers}, k]"
        )
    if array.size and (array.min() < -1 or array.max() >= max(length, 1)):
        raise CaptureError(
            f"the choices of sequence {sequence} go from {array.min()} to {array.max()}; expected units of a sequence "
            f"of {length} tokens, or -1; {UNFUSED}"
        )
    return array.astype(np.int32, copy=False)
