"""Rows to blocks and back. A block is a range of stored rows that begins with a sequence, so that it is read alone.

Block b holds the rows `block_starts[b]:block_starts[b + 1]`: their tokens, their validity, and per layer one payload
with the routed ones among them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import TraceContentError
from foreroute.trace.check import as_offsets, check_rows, segment_rows
from foreroute.trace.codec import CODECS, CodecName, encoder
from foreroute.trace.container import RoutingTrace
from foreroute.trace.index import TraceIndex, write_index
from foreroute.trace.seal import SEAL_BYTES, seal_payloads, seal_rows
from foreroute.trace.sharing import share_prefixes
from foreroute.trace.spec import RoutingSpec

ROWS_PER_EXPERT = 8
LEAST_ROWS, MOST_ROWS = 1024, 8192


def encode_trace(trace: RoutingTrace, name: CodecName) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata and tensors of the file of a trace.

    Raises:
        TraceContentError: when a row cannot be true, or the codec is unknown.
    """
    if name not in CODECS:
        raise TraceContentError(f"codec {name!r} is unknown; expected one of {', '.join(CODECS)}")
    ids = np.ascontiguousarray(trace.expert_ids_NLK)
    _refuse_bad_cells(trace, ids)
    runs, rows_U, stored_S = share_prefixes(trace)
    starts = cut_blocks(stored_S, trace.spec)
    bounds = list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
    tokens, valid, versions = trace.token_ids_N[rows_U], trace.valid_N[rows_U], trace.weight_versions_N[rows_U]
    blocks = [rows_U[a:b][valid[a:b]] for a, b in bounds]
    codec = encoder(name, trace.spec, ids, blocks)
    words_BL = np.zeros((len(blocks), trace.spec.num_layers), np.uint32)
    payloads, seals = [np.zeros(0, np.uint64)], []
    for b, rows in enumerate(blocks):
        words, sizes = codec.encode(ids, rows) if len(rows) else (payloads[0], words_BL[b].astype(np.int64))
        words_BL[b] = sizes
        seals.append(seal_payloads(words, np.cumsum(sizes) - sizes, sizes))
        payloads.append(words)
    spans = np.flatnonzero(np.r_[True, versions[1:] != versions[:-1]][: len(versions)])
    index = TraceIndex(
        spec=trace.spec,
        codec_name=name,
        codec=codec,
        pick_order_kept=trace.pick_order_kept and codec.keeps_order,
        provenance=trace.provenance,
        runs=runs,
        block_starts=starts,
        span_starts=spans,
        span_versions=versions[spans],
        payload_words=words_BL,
        payload_seals=_as_seals(seals, *words_BL.shape),
        row_seals=_as_seals([seal_rows(tokens[a:b], valid[a:b]) for a, b in bounds], len(bounds)),
    )
    metadata, tensors = write_index(index)
    bits = np.packbits(valid, bitorder="little")
    return metadata, {**tensors, "token_ids": tokens, "valid_bits": bits, "payloads": np.concatenate(payloads)}


def read_rows(file: Any, index: TraceIndex, sequences: NDArray[np.int64], positions: NDArray[np.int64]) -> RoutingTrace:
    """The given sequences and layers of an opened file.

    Args:
        file: a `safetensors.safe_open`.
        index: its checked head.
        sequences: int64 [S'].
        positions: int64 [L'], places on the file's layer axis.

    Raises:
        TraceContentError: when a seal or a payload is wrong.
    """
    runs = index.runs.of(sequences)
    blocks, rows_N = _needed_blocks(index.block_starts, runs.starts, runs.lengths)
    edges = as_offsets(np.diff(index.block_starts)[blocks])
    tokens, valid = np.empty(edges[-1], np.int32), np.empty(edges[-1], np.bool_)
    versions = np.empty(edges[-1], np.int32)
    bounds = list(zip(blocks.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    for b, start, stop in bounds:
        tokens[start:stop], valid[start:stop], versions[start:stop] = _read_columns(file, index, b)
    # A stored row that several sequences share is decoded into the first of its rows and copied to the others.
    dest = np.full(len(tokens), -1, np.int64)
    order = np.arange(len(rows_N))
    dest[rows_N[::-1]] = order[::-1]
    spec = replace(index.spec, layers=tuple(index.spec.layers[p] for p in positions))
    ids = np.zeros((len(rows_N), spec.num_layers, spec.top_k), spec.id_dtype)
    for b, start, stop in bounds:
        _decode_block(file, index, b, positions, dest[start:stop][valid[start:stop]], ids)
    again = np.flatnonzero(dest[rows_N] != order)
    ids[again] = ids[dest[rows_N[again]]]
    return RoutingTrace(
        spec=spec,
        expert_ids_NLK=ids,
        valid_N=valid[rows_N],
        token_ids_N=tokens[rows_N],
        weight_versions_N=versions[rows_N],
        offsets=as_offsets(runs.rows_per_sequence),
        provenance=index.provenance,
        pick_order_kept=index.pick_order_kept,
    )


def cut_blocks(stored_S: NDArray[np.int64], spec: RoutingSpec) -> NDArray[np.int64]:
    """First stored row of each block, and the number of stored rows at the end: int64 [B + 1].

    A block aims at 8 rows per expert, from 1,024 to 8,192: fewer make the ranking of experts dear, more make it blunt.
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


def _even(total: int, parts: int) -> NDArray[np.int64]:
    return np.full(parts, total // parts) + (np.arange(parts) < total % parts)


def _refuse_bad_cells(trace: RoutingTrace, ids: NDArray[Any]) -> None:
    from foreroute.trace.codec.bits import first_bad_cell

    spec = trace.spec
    routed = np.flatnonzero(trace.valid_N)
    if first_bad_cell(ids.reshape(-1), spec.num_layers, spec.top_k, routed, spec.num_experts) >= 0:
        check_rows(ids, trace.valid_N, trace.offsets, spec)


def _as_seals(parts: list[bytes], *shape: int) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(parts), np.uint8).reshape(*shape, SEAL_BYTES)


def _needed_blocks(
    block_starts: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The blocks that runs of stored rows touch, and where each row of the runs is among the rows of those blocks."""
    first = np.searchsorted(block_starts, starts, side="right") - 1
    after = np.searchsorted(block_starts, starts + lengths, side="left")
    change = np.zeros(len(block_starts), np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, after, -1)
    blocks = np.flatnonzero(np.cumsum(change)[:-1] > 0)
    compact = as_offsets(np.diff(block_starts)[blocks])
    before = compact[np.searchsorted(blocks, first)] - block_starts[first]
    return blocks, segment_rows(starts + before, lengths)


def _read_columns(
    file: Any, index: TraceIndex, block: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int32]]:
    start, stop = (int(row) for row in index.block_starts[block : block + 2])
    tokens = file.get_slice("token_ids")[start:stop]
    bits = file.get_slice("valid_bits")[start // 8 : (stop + 7) // 8]
    valid = np.unpackbits(bits, bitorder="little")[start % 8 :][: stop - start].astype(np.bool_)
    if seal_rows(tokens, valid) != index.row_seals[block].tobytes():
        raise TraceContentError(f"the tokens of block {block} are not those that the routes were sealed with")
    return tokens, valid, index.versions(start, stop)


def _decode_block(
    file: Any,
    index: TraceIndex,
    block: int,
    positions: NDArray[np.int64],
    dest: NDArray[np.int64],
    out_NLK: NDArray[Any],
) -> None:
    sizes = index.payload_words[block].astype(np.int64)
    if not len(dest):
        if sizes.any():
            raise TraceContentError(f"block {block} has payloads but no routed row")
        return
    starts = as_offsets(sizes)
    low, high = int(positions.min()), int(positions.max()) + 1
    begin = int(index.payload_begins[block])
    words = file.get_slice("payloads")[begin + int(starts[low]) : begin + int(starts[high])]
    starts, sizes = starts[positions] - starts[low], sizes[positions]
    if seal_payloads(words, starts, sizes) != index.payload_seals[block, positions].tobytes():
        raise TraceContentError(f"a payload of block {block} is not what was written")
    index.codec.decode(words, starts, sizes, dest, np.arange(len(positions)), out_NLK)
