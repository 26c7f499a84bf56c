"""A file to a trace, whole or in part: the blocks that hold the wanted rows, in the wanted layers, and nothing else.

`load` checks the header, finds the blocks that the wanted sequences touch, verifies the seal of all that it uses, and
decodes each block into place. A row that several sequences share is decoded once and copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import TraceContentError, TraceFileError
from foreroute.files import TensorFile, is_text, parse_json, seal_arrays, seal_file
from foreroute.trace.checks import as_offsets, as_sequence_numbers, ascending, check_memory, join_ranges
from foreroute.trace.container import GATE_WEIGHTS, NO_VERSION, RoutingTrace
from foreroute.trace.file.codec import CODEC_CLASSES, CODECS, Codec
from foreroute.trace.file.format import (
    BULK,
    FLOATS,
    FORMAT_VERSION,
    KEY,
    MAX_EXPANSION,
    METADATA,
    MOST_HEADER_BYTES,
    SEAL_BYTES,
    SHAPES,
    TABLES,
    StoredRuns,
    is_bulk,
)
from foreroute.trace.file.streams import (
    NeededRows,
    Payloads,
    StoredStream,
    decode_weights,
    read_sets_of,
    row_bytes,
    stored_streams,
)
from foreroute.trace.spec import RoutedLayer, RoutingSpec, layers_from

ROWS_AT_ONCE = 1 << 18
"""Rows that are copied with one index array: its 8 bytes per row may be more than the routes of a row take."""


@dataclass(frozen=True)
class TraceHeader:
    """What a file says about itself. U stored rows in B blocks of L payloads each.

    Attributes:
        spec: the model.
        codec: the one that wrote the payloads, with the file's tables.
        pick_order_kept: whether the ids of a row are in pick order.
        provenance: what made the trace.
        runs: how sequences are chained from stored rows.
        block_starts: int64 [B + 1], first stored row of each block, U at the end.
        span_starts: int64 [V], first stored row of each run of one weight version.
        span_versions: int32 [V].
        row_seals: uint8 [B, 16].
        routes: their payloads.
        streams: those beside the routes by name.
        id_counts: int64 [B, D] by name, for those of sets: the ids in each payload.
        stored_bytes: of tokens and payloads.
    """

    spec: RoutingSpec
    codec: Codec
    pick_order_kept: bool
    provenance: Mapping[str, str]
    runs: StoredRuns
    block_starts: NDArray[np.int64]
    span_starts: NDArray[np.int64]
    span_versions: NDArray[np.int32]
    row_seals: NDArray[np.uint8]
    routes: Payloads
    streams: Mapping[str, tuple[StoredStream, Payloads]]
    id_counts: Mapping[str, NDArray[np.int64]]
    stored_bytes: int


def load(
    path: str | os.PathLike[str],
    *,
    sequences: ArrayLike | None = None,
    layers: Iterable[RoutedLayer] | None = None,
    streams: Iterable[str] | None = None,
) -> RoutingTrace:
    """Read a trace, or the sequences, layers and streams that a rank needs, and verify every byte that is used.

    Reading a part gives what `load(path).select(sequences).select_layers(layers)` gives, and decodes only the blocks
    that hold those sequences, in those layers alone.

    Args:
        path: a file written by `save`.
        sequences: integers [S'], each from 0 to S - 1; all in order when left out.
        layers: members of the file's layer table; all in order when left out.
        streams: names of those wanted beside the routes, "gate_weights" among them; all when left out. Others are not
            read.

    Raises:
        TraceFileError: when the file is missing, not a trace, of another format, truncated or damaged.
        TraceContentError: when a sequence or a stream is not in the file, or no layer is asked for.
        SpecMismatchError: when a layer is not in the file.
    """
    source = Path(path)
    with TensorFile(source, TraceFileError, most_header_bytes=MOST_HEADER_BYTES) as file:
        try:
            header = _read_header(file)
        except TraceContentError as error:
            raise _damage(source, error) from error
        spec, runs = header.spec, header.runs
        if sequences is not None:
            runs = _runs_of(runs, as_sequence_numbers(sequences, len(runs.offsets) - 1))
        if layers is None:
            positions = np.arange(spec.num_layers)
        else:
            chosen = list(layers)
            positions = spec.positions(chosen)
            spec = replace(spec, layers=tuple(chosen))
        wanted = list(header.streams) if streams is None else list(streams)
        if missing := [name for name in wanted if name not in header.streams]:
            raise TraceContentError(
                f"{source} has no stream {missing[0]!r:.40}; it has {', '.join(header.streams) or 'routes alone'}"
            )
        try:
            return _read_rows(file, header, spec, runs, positions, wanted)
        except TraceContentError as error:
            raise _damage(source, error) from error


def _damage(source: Path, error: TraceContentError) -> TraceFileError:
    return TraceFileError(f"{source} is damaged: {error}. Record or copy it again")


def _read_header(file: TensorFile) -> TraceHeader:
    """Read and check the header of an opened file.

    Raises:
        TraceFileError: when it is no trace, or one of another format.
        TraceContentError: when it cannot be right.
    """
    _check_version(file)
    ours = {key: value for key, value in file.metadata.items() if key.startswith(KEY)}
    streams = stored_streams(ours.get("foreroute.streams", "[]"))
    _check_names(ours, file, streams)
    sizes = {name: tensor.shape[0] for name, tensor in file.tensors.items() if is_bulk(name)}
    small = [name for name in file.tensors if not is_bulk(name)]
    if not all(map(is_text, ours.values())):
        raise TraceContentError("its metadata hold halves of characters")
    tensors = file.read_all(small)
    last_bits = file.read("valid_bits", max(0, sizes["valid_bits"] - 1), sizes["valid_bits"])
    stated = ours.pop("foreroute.digest")
    digest = seal_file(ours, tensors)
    if digest != stated:
        raise TraceContentError(f"its digest is {digest}, the file states {stated:.40}")
    facts = parse_json(ours["foreroute.spec"], TraceContentError, name="foreroute.spec")
    provenance = parse_json(ours["foreroute.provenance"], TraceContentError, name="foreroute.provenance")
    if not isinstance(provenance, dict) or not all(map(is_text, [*provenance, *provenance.values()])):
        raise TraceContentError(f"provenance is {provenance!r:.80}; expected a table of texts")
    name, tables = ours["foreroute.codec"], {name: tensors[name] for name in TABLES if name in tensors}
    spec = _spec_from(facts)
    if name not in CODEC_CLASSES:
        raise TraceContentError(f"codec {name!r} is unknown; expected one of {', '.join(CODECS)}")
    codec = CODEC_CLASSES[name](spec, tables)
    if set(codec.tables) != set(tables):
        raise TraceContentError(f"codec {name} has no {', '.join(set(tables) - set(codec.tables))}")
    order = ours["foreroute.pick_order"]
    if order not in (("kept", "dropped") if codec.keeps_order else ("dropped",)):
        raise TraceContentError(f"pick order cannot be {order!r:.40} with codec {name}")
    _check_blocks(tensors, sizes, last_bits)
    shape = (len(tensors["row_seals"]), spec.num_layers)
    routes = Payloads("payloads", tensors["payload_words"], tensors["payload_seals"])
    routes.check(shape, sizes["payloads"])
    beside = {
        stream.name: (stream, stream.payloads(tensors, shape, sizes[f"{stream.name}.payloads"])) for stream in streams
    }
    runs = _checked_runs(tensors, sizes["token_ids"])
    stored_bytes = 4 * sizes["token_ids"] + 8 * sum(size for name, size in sizes.items() if name.endswith("payloads"))
    check_memory(int(runs.edges[-1]) * row_bytes(spec, streams), stored_bytes)
    return TraceHeader(
        spec=spec,
        codec=codec,
        pick_order_kept=order == "kept",
        provenance=provenance,
        runs=runs,
        routes=routes,
        streams=beside,
        id_counts={
            name: tensors[f"{name}.id_counts"] for name, (stream, _) in beside.items() if stream.codec != FLOATS
        },
        stored_bytes=stored_bytes,
        **{name: tensors[name] for name in ("block_starts", "span_starts", "span_versions", "row_seals")},
    )


def _check_version(file: TensorFile) -> None:
    version = file.metadata.get("foreroute.version")
    if version is None:
        beside = file.metadata.get("foreroute.trace")
        hint = "" if beside is None else f"; it is a generation, whose trace is {beside!r:.120} in the same folder"
        raise TraceFileError(f"{file.path} is a safetensors file but not a routing trace (no foreroute.version){hint}")
    if version != str(FORMAT_VERSION):
        raise TraceFileError(
            f"{file.path} has trace format {version:.40}; this foreroute reads format {FORMAT_VERSION}. "
            + ("Record it again" if version == "1" else "Upgrade foreroute")
        )


def _check_names(ours: Mapping[str, str], file: TensorFile, streams: Iterable[StoredStream]) -> None:
    """Refuse a file that lacks a key or tensor, has another type of one, or has others; nothing is read yet."""
    there = {*ours, *file.tensors}
    needed = {**SHAPES, **{name: (dtype, 1) for name, dtype in BULK.items()}}
    for stream in streams:
        needed |= stream.shapes
    missing = [name for name in (*METADATA, *needed) if name not in there]
    unknown = (set(ours) - set(METADATA)) | (set(file.tensors) - {*needed, *TABLES})
    if missing or unknown:
        raise TraceContentError(f"missing: {_few(missing)}; unknown: {_few(sorted(unknown))}")
    for name, (dtype, ndim) in {**needed, **TABLES}.items():
        if name not in there:
            continue
        found = file.tensors[name]
        if found.dtype != np.dtype(dtype) or len(found.shape) != ndim:
            raise TraceContentError(
                f"tensor {name} is {found.dtype} of shape {found.shape}, expected {np.dtype(dtype)} with {ndim} axes"
            )


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(f"{name:.40}" for name in listed[:8]) + (", ..." if len(listed) > 8 else "") or "nothing"


def _spec_from(facts: Any) -> RoutingSpec:
    if not isinstance(facts, dict) or set(facts) != {"num_experts", "top_k", "layers", "model"}:
        raise TraceContentError(f"foreroute.spec is {facts!r:.80}; expected num_experts, top_k, layers and model")
    if not is_text(facts["model"]):
        raise TraceContentError(f"the model's name is {facts['model']!r:.40}; expected text")
    return RoutingSpec(facts["num_experts"], facts["top_k"], layers_from(facts["layers"]), facts["model"])


def _check_blocks(tensors: Mapping[str, NDArray[Any]], sizes: Mapping[str, int], last_bits: NDArray[np.uint8]) -> None:
    """Refuse blocks and weight-version spans that do not fit the stored rows and each other."""
    stored, starts = sizes["token_ids"], tensors["block_starts"]
    if not _tiles(starts[:-1], stored) or starts[-1:].tolist() != [stored] or sizes["valid_bits"] != (stored + 7) // 8:
        raise TraceContentError(f"blocks or validity bits do not tile {stored} stored rows")
    if not _tiles(tensors["span_starts"], stored) or len(tensors["span_starts"]) != len(tensors["span_versions"]):
        raise TraceContentError(f"weight-version spans do not tile {stored} stored rows")
    if (least := tensors["span_versions"].min(initial=0)) < -1:
        raise TraceContentError(f"a weight version is {least}; expected 0 or more, or -1")
    if stored % 8 and int(last_bits[0]) >> stored % 8:
        raise TraceContentError(f"valid_bits has bits past the {stored} stored rows")
    if tensors["row_seals"].shape != (len(starts) - 1, SEAL_BYTES):
        raise TraceContentError(f"row_seals has shape {tensors['row_seals'].shape} for {len(starts) - 1} blocks")


def _tiles(starts: NDArray[np.int64], total: int) -> bool:
    """Say whether the starts of non-empty intervals begin at 0, ascend and stay below `total`."""
    if total == 0 or len(starts) == 0:
        return total == len(starts) == 0
    return bool(starts[0] == 0 and starts[-1] < total and (starts[1:] > starts[:-1]).all())


def _checked_runs(tensors: Mapping[str, NDArray[Any]], stored: int) -> StoredRuns:
    offsets, starts, lengths = tensors["run_offsets"], tensors["run_starts"], tensors["run_lengths"]
    if not ascending(offsets, len(starts)) or len(starts) != len(lengths):
        raise TraceContentError("run_offsets do not go from 0 to the number of runs")
    # starts + lengths could wrap; stored - lengths cannot, once 1 <= lengths <= stored
    inside = (starts >= 0) & (lengths >= 1) & (lengths <= stored) & (starts <= stored - lengths)
    if not inside.all():
        raise TraceContentError(f"a run leaves the {stored} stored rows")
    edges = as_offsets(lengths)
    if edges[-1] > MAX_EXPANSION * stored:
        raise TraceContentError(f"the sequences have more than {MAX_EXPANSION} times the {stored} stored rows")
    return StoredRuns(offsets, starts, lengths, edges)


def _runs_of(runs: StoredRuns, sequences: NDArray[np.int64]) -> StoredRuns:
    """Return the runs of the given sequences, in that order."""
    counts = np.diff(runs.offsets)[sequences]
    chosen = join_ranges(runs.offsets[sequences], counts)
    return StoredRuns(as_offsets(counts), runs.starts[chosen], runs.lengths[chosen], as_offsets(runs.lengths[chosen]))


def _read_rows(
    file: TensorFile,
    header: TraceHeader,
    spec: RoutingSpec,
    runs: StoredRuns,
    positions: NDArray[np.int64],
    wanted: Sequence[str],
) -> RoutingTrace:
    """Read the sequences that are made of the given runs, in some layers, with some streams.

    Args:
        file: the trace file.
        header: checked.
        spec: of the result, with the layers at `positions`.
        runs: of the wanted sequences.
        positions: int64 [L'], places on the file's layer axis.
        wanted: names of streams.

    Raises:
        TraceFileError: when the file was cut meanwhile.
        TraceContentError: when a seal, a payload, a token or a weight version is wrong.
    """
    # Three numberings of rows: the U stored rows of the file; the "near" rows, those of the blocks that are read,
    # joined; and the N wanted rows. A wanted row is a near one; a near row may be wanted by none or several sequences.
    blocks, near_starts, near_edges = _needed_blocks(header.block_starts, runs.starts, runs.lengths)
    num_rows, num_near = int(runs.edges[-1]), int(near_edges[-1])
    as_stored = num_rows == num_near and np.array_equal(near_starts, runs.edges[:-1])
    near_N = np.arange(num_near) if as_stored else join_ranges(near_starts, runs.lengths)
    dest = near_N if as_stored else _first_wanted(near_N, num_near)
    columns = np.zeros(num_near, np.int32), np.zeros(num_near, np.bool_), np.zeros(num_near, np.int32)
    ids_NLK = np.zeros((num_rows, spec.num_layers, spec.top_k), spec.id_dtype)
    weights_NLK = np.zeros(ids_NLK.shape, np.float32) if GATE_WEIGHTS in wanted else None
    _read_blocks(file, header, positions, blocks, near_edges, dest, columns, ids_NLK, weights_NLK)
    tokens, valid, versions = columns
    if not as_stored:
        for start, stop in _chunks(num_rows):  # every near row stands in the first row that wants it: copy the others
            first = dest[near_N[start:stop]]
            again = np.flatnonzero(first != np.arange(start, stop))
            ids_NLK[start + again] = ids_NLK[first[again]]
            if weights_NLK is not None:
                weights_NLK[start + again] = weights_NLK[first[again]]
        tokens, valid, versions = tokens[near_N], valid[near_N], versions[near_N]
    needed = NeededRows(blocks, near_edges, near_N)
    return RoutingTrace(
        spec=spec,
        expert_ids_NLK=ids_NLK,
        valid_N=valid,
        token_ids_N=tokens,
        weight_versions_N=versions,
        offsets=runs.edges[runs.offsets],
        provenance=header.provenance,
        pick_order_kept=header.pick_order_kept,
        gate_weights_NLK=weights_NLK,
        streams={
            name: read_sets_of(file, *header.streams[name], header.id_counts[name], needed, header.stored_bytes)
            for name in wanted
            if name in header.id_counts
        },
    )


def _needed_blocks(
    block_starts: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find the blocks that runs of stored rows touch.

    Returns:
        blocks: int64 [B'], their numbers, ascending.
        near_starts: int64 [Q], where each run starts among the rows of those blocks, joined.
        near_edges: int64 [B' + 1], where each of those blocks starts among them.
    """
    first = np.searchsorted(block_starts, starts, side="right") - 1
    after = np.searchsorted(block_starts, starts + lengths, side="left")
    # +1 where a run comes to its first block, -1 behind its last one: the sum so far is the runs that touch a block
    change = np.zeros(len(block_starts), np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, after, -1)
    blocks = np.flatnonzero(np.cumsum(change)[:-1] > 0)
    near_edges = np.r_[0, np.cumsum(np.diff(block_starts)[blocks])]
    # A run lies within blocks that are all needed, so that its rows stay neighbours.
    before = near_edges[np.searchsorted(blocks, first)] - block_starts[first]
    return blocks, starts + before, near_edges


def _first_wanted(near_N: NDArray[np.int64], num_near: int) -> NDArray[np.int64]:
    """Return the first wanted row that each near row is decoded into, -1 for none: int64 [num_near]."""
    dest = np.full(num_near, -1, np.int64)
    # From the last row to the first one: of several that want a near row, the first is written last.
    for start, stop in reversed(_chunks(len(near_N))):
        dest[near_N[start:stop][::-1]] = np.arange(start, stop)[::-1]
    return dest


def _read_blocks(
    file: TensorFile,
    header: TraceHeader,
    positions: NDArray[np.int64],
    blocks: NDArray[np.int64],
    near_edges: NDArray[np.int64],
    dest: NDArray[np.int64],
    columns: tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int32]],
    out_NLK: NDArray[Any],
    weights_NLK: NDArray[np.float32] | None,
) -> None:
    """Read and verify blocks: tokens, validity and versions of all their rows, and the routes of those wanted.

    Args:
        file: the trace file.
        header: checked.
        positions: int64 [L'], the wanted layers.
        blocks: int64 [B'], their numbers.
        near_edges: int64 [B' + 1], where the rows of each block are in `dest` and `columns`.
        dest: int64, the row of `out_NLK` for each near row, -1 where it is not wanted.
        columns: tokens, validity and weight versions of the near rows, written.
        out_NLK: written.
        weights_NLK: gate weights, where they are wanted; written.

    Raises:
        TraceContentError: when something is not what was sealed, cannot be true, or does not decode.
    """
    tokens, valid, versions = columns
    codec, out_layers = header.codec, np.arange(len(positions))
    for block, (a, b) in zip(blocks.tolist(), pairwise(near_edges.tolist()), strict=True):
        start, stop = header.block_starts[block : block + 2].tolist()
        versions[a:b] = _versions(header, start, stop)
        tokens[a:b] = file.read("token_ids", start, stop)
        bits = np.unpackbits(file.read("valid_bits", start // 8, (stop + 7) // 8), bitorder="little")
        valid[a:b] = bits[start % 8 :][: stop - start]
        if seal_arrays(tokens[a:b], valid[a:b]) != header.row_seals[block].tobytes():
            raise TraceContentError(f"the tokens of block {block} are not those that its routes belong to")
        if tokens[a:b].min() < 0:
            raise TraceContentError(f"a token id is {tokens[a:b].min()}; expected 0 or more")
        if (versions[a:b][~valid[a:b]] != NO_VERSION).any():
            raise TraceContentError("a row without routes states a weight version; expected -1")
        rows = dest[a:b][valid[a:b]]
        words, starts, sizes = header.routes.read(file, block, positions)
        if weights_NLK is not None:
            decode_weights(*header.streams[GATE_WEIGHTS][1].read(file, block, positions), rows, weights_NLK)
        if not len(rows):
            if sizes.any():
                raise TraceContentError(f"block {block} has payloads but no routed row")
            continue
        codec.decode(words, starts, sizes, rows, out_layers, out_NLK)
        if codec.keeps_order and not header.pick_order_kept:
            ids_RLK = out_NLK[rows[rows >= 0]]
            if (ids_RLK[..., 1:] <= ids_RLK[..., :-1]).any():
                raise TraceContentError(f"a row of block {block} does not ascend, though pick order was dropped")


def _versions(header: TraceHeader, start: int, stop: int) -> NDArray[np.int32]:
    """Return the weight versions of a range of stored rows, int32 [stop - start]."""
    first = int(np.searchsorted(header.span_starts, start, side="right")) - 1
    after = int(np.searchsorted(header.span_starts, stop, side="left"))
    edges = np.append(header.span_starts[first:after], stop)
    edges[0] = start
    return np.repeat(header.span_versions[first:after], edges[1:] - edges[:-1])


def _chunks(rows: int) -> list[tuple[int, int]]:
    return [(start, min(start + ROWS_AT_ONCE, rows)) for start in range(0, rows, ROWS_AT_ONCE)]
