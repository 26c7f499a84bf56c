"""Rows of a trace file to a trace: the blocks that hold them, in the layers that are wanted, and nothing else."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import TraceContentError
from foreroute.files import TensorFile
from foreroute.trace.blocks import needed_blocks
from foreroute.trace.check import as_offsets, segment_rows
from foreroute.trace.container import NO_VERSION, RoutingTrace
from foreroute.trace.index import TraceIndex
from foreroute.trace.seal import seal_payloads, seal_rows
from foreroute.trace.spec import RoutingSpec

ROWS_AT_ONCE = 1 << 18


def read_rows(
    file: TensorFile, index: TraceIndex, spec: RoutingSpec, sequences: NDArray[np.int64], positions: NDArray[np.int64]
) -> RoutingTrace:
    """The given sequences and layers of an opened file.

    Args:
        file: the trace file.
        index: its checked head.
        spec: of the result, with the layers at `positions`.
        sequences: int64 [S'].
        positions: int64 [L'], places on the file's layer axis.

    Raises:
        TraceFileError: when the file was cut meanwhile.
        TraceContentError: when a seal, a payload, a token or a weight version is wrong.
    """
    runs = index.runs.of(sequences)
    blocks, starts = needed_blocks(index.block_starts, runs.starts, runs.lengths)
    reader = _BlockReader(file, index, positions)
    tokens, valid, versions = reader.columns(blocks)
    rows_N = _rows_among(len(tokens), starts, runs.lengths)
    dest = np.arange(len(tokens)) if rows_N is None else _first_places(rows_N, len(tokens))
    num_rows = int(runs.lengths.sum())
    ids = np.zeros((num_rows, spec.num_layers, spec.top_k), spec.id_dtype)
    edges = as_offsets(np.diff(index.block_starts)[blocks]).tolist()
    for block, (start, stop) in zip(blocks.tolist(), pairwise(edges), strict=True):
        reader.decode(block, dest[start:stop][valid[start:stop]], ids)
    if rows_N is not None:
        for start, stop in _chunks(num_rows):
            first = dest[rows_N[start:stop]]
            again = np.flatnonzero(first != np.arange(start, stop))
            ids[start + again] = ids[first[again]]
        tokens, valid, versions = tokens[rows_N], valid[rows_N], versions[rows_N]
    return RoutingTrace(
        spec=spec,
        expert_ids_NLK=ids,
        valid_N=valid,
        token_ids_N=tokens,
        weight_versions_N=versions,
        offsets=as_offsets(runs.rows_per_sequence),
        provenance=index.provenance,
        pick_order_kept=index.pick_order_kept,
    )


class _BlockReader:
    """Blocks of one opened file, in some of its layers."""

    def __init__(self, file: TensorFile, index: TraceIndex, positions: NDArray[np.int64]) -> None:
        self._file, self._index = file, index
        self._columns = np.arange(len(positions))
        # Layers between the wanted ones are read, being on the way, and neither sealed nor decoded.
        low, high = int(positions.min()), int(positions.max()) + 1
        ends_BL = np.cumsum(index.payload_words.reshape(-1), dtype=np.int64).reshape(index.payload_words.shape)
        self._sizes_BC = index.payload_words[:, positions].astype(np.int64)
        first_B = ends_BL[:, low] - index.payload_words[:, low]
        self._starts_BC = ends_BL[:, positions] - self._sizes_BC - first_B[:, None]
        self._spans_B = list(zip(first_B.tolist(), ends_BL[:, high - 1].tolist(), strict=True))
        self._seals_BC = index.payload_seals[:, positions]

    def columns(self, blocks: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int32]]:
        """Tokens, validity and weight versions of all rows of the blocks, ascending, joined."""
        parts = [self._range(int(b[0]), int(b[-1]) + 1) for b in _contiguous(blocks)]
        if len(parts) == 1:
            return parts[0]
        tokens = np.concatenate([np.zeros(0, np.int32), *(part[0] for part in parts)])
        valid = np.concatenate([np.zeros(0, np.bool_), *(part[1] for part in parts)])
        return tokens, valid, np.concatenate([np.zeros(0, np.int32), *(part[2] for part in parts)])

    def decode(self, block: int, dest: NDArray[np.int64], out_NLK: NDArray[Any]) -> None:
        """Put the routed rows of a block at `dest`, where it is not -1.

        Raises:
            TraceContentError: when a payload is not the one that was sealed, or does not decode.
        """
        starts, sizes = self._starts_BC[block], self._sizes_BC[block]
        if not len(dest):
            if sizes.any():
                raise TraceContentError(f"block {block} has payloads but no routed row")
            return
        words = self._file.read("payloads", *self._spans_B[block])
        if seal_payloads(words, starts, sizes) != self._seals_BC[block].tobytes():
            raise TraceContentError(f"a payload of block {block} is not what was written")
        self._index.codec.decode(words, starts, sizes, dest, self._columns, out_NLK)
        if self._index.codec.keeps_order and not self._index.pick_order_kept:
            ids_RLK = out_NLK[dest[dest >= 0]]
            if (ids_RLK[..., 1:] <= ids_RLK[..., :-1]).any():
                raise TraceContentError(f"a row of block {block} does not ascend, though pick order was dropped")

    def _range(self, first: int, after: int) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int32]]:
        edges = self._index.block_starts[first : after + 1].tolist()
        start, stop = edges[0], edges[-1]
        tokens = self._file.read("token_ids", start, stop)
        bits = np.unpackbits(self._file.read("valid_bits", start // 8, (stop + 7) // 8), bitorder="little")
        valid = bits[start % 8 :][: stop - start].astype(np.bool_)
        for i, (a, b) in enumerate(pairwise(edges)):
            seal = seal_rows(tokens[a - start : b - start], valid[a - start : b - start])
            if seal != self._index.row_seals[first + i].tobytes():
                raise TraceContentError(f"the tokens of block {first + i} are not those that its routes belong to")
        versions = self._index.versions(start, stop)
        if tokens.min(initial=0) < 0:
            raise TraceContentError(f"a token id is {tokens.min()}; expected 0 or more")
        if (versions[~valid] != NO_VERSION).any():
            raise TraceContentError("a row without routes states a weight version; expected -1")
        return tokens, valid, versions


def _rows_among(stored: int, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """int64 [N], the stored row of each wanted row; None when the wanted rows are the stored ones, as they stand."""
    ends = as_offsets(lengths)
    if ends[-1] == stored and np.array_equal(starts, ends[:-1]):
        return None
    return segment_rows(starts, lengths)


def _first_places(rows_N: NDArray[np.int64], stored: int) -> NDArray[np.int64]:
    """int64 [stored], the first wanted row that each stored row is decoded into; -1 for none.

    Other sequences that share the row copy it from there.
    """
    places = np.full(stored, -1, np.int64)
    for start, stop in reversed(_chunks(len(rows_N))):
        places[rows_N[start:stop][::-1]] = np.arange(start, stop)[::-1]
    return places


def _chunks(rows: int) -> list[tuple[int, int]]:
    """Parts of so many rows, so that indices of all of them are not made at once: a row may be smaller than they."""
    return [(start, min(start + ROWS_AT_ONCE, rows)) for start in range(0, rows, ROWS_AT_ONCE)]


def _contiguous(numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    pieces = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return [piece for piece in pieces if len(piece)]
