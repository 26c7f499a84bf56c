"""Traces on disk, format 3: one safetensors file, written whole or not at all, read whole or in part.

    header      the model and its layers, what made the trace, and one checksum over all that is small
    lengths     sequence 0 has 700 rows, sequence 1 has 512, ...
    chunks      chunk 0: rows 0 .. 15871      chunk 1: rows 15872 .. 32103 ...     cut where sequences begin
    frames      chunk 0: rows, layer 0, layer 1, ..., streams      chunk 1: rows, layer 0, ...
                each a zstd frame with a checksum of its own

A frame holds the rows of one chunk in one layer as planes of bytes (`trace.planes`). The first frame of a chunk has
what does not depend on the layer: tokens, weight versions and validity. A reader of some sequences and layers finds
the chunks that hold the sequences, and there the frames of its layers. A prompt that several responses share is
stored again with each of them; zstd finds it. `docs/formats.md` is the whole format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import TraceContentError, TraceFileError
from foreroute.files import ByteSource, FileFormat, TensorFile, TensorSchema, is_text, parse_json
from foreroute.trace.checks import (
    as_offsets,
    as_sequence_numbers,
    as_tokens,
    as_versions,
    check_memory,
    check_rows,
    join_ranges,
)
from foreroute.trace.container import NO_VERSION, RoutingTrace
from foreroute.trace.gate_weights import GateWeights
from foreroute.trace.planes import from_bytes, sorted_columns, to_bytes, transposed
from foreroute.trace.spec import RoutedLayer, RoutingSpec, as_layers, layers_from
from foreroute.trace.streams import DecisionStream, Stream

Encoding = Literal["sets", "ordered"]
ENCODINGS: tuple[Encoding, ...] = ("sets", "ordered")
FRAMES = "frames"
FORMAT = FileFormat(
    name="trace",
    version=3,
    kind=TraceFileError,
    metadata=("model", "layers", "encoding", "streams", "provenance"),
    tensors={
        "lengths": TensorSchema("I64", "S"),
        "chunk_rows": TensorSchema("I64", "C"),
        "frame_bytes": TensorSchema("I64", "CF"),
        "content_bytes": TensorSchema("I64", "CF"),
        FRAMES: TensorSchema("U8", "Z"),
    },
    made_by="foreroute.save writes traces; what an earlier foreroute wrote must be recorded again",
    apart=(FRAMES,),
)
"""S sequences, C chunks, F frames in a chunk, Z bytes of all frames. `frames` are read in part: each has a checksum."""
KINDS: dict[str, type[DecisionStream] | type[GateWeights]] = {each.kind: each for each in (DecisionStream, GateWeights)}
MOST_STREAMS = 16
CHUNK_ROWS, MOST_CHUNK_ROWS = 1 << 14, 1 << 16
"""Rows that a chunk aims at, and has at most. From 4,096 to 32,768 the size of a file changes by less than a
hundredth. With fewer rows frames cost more time each, with more a reader of few sequences decodes more that it does not
need. A plane of 65,536 bytes and all of its frame lie within zstd's window."""
CHUNK_MEMORY = 1 << 26
"""Bytes that the rows of a chunk take in memory, if that is less: choices of indexers take half a megabyte for each."""
ROW_BYTES = 9
"""Of a row in the first frame: 4 of the token, 4 of the weight version, 1 of validity."""


def save(
    trace: RoutingTrace, path: str | os.PathLike[str], *, encoding: Encoding = "sets", overwrite: bool = False
) -> Path:
    """Write `trace` to `path`: the whole file or nothing. Equal traces give equal bytes.

    Args:
        trace: what to write.
        path: where to.
        encoding: "sets" keeps which experts were picked, and gate weights with them, and drops the order of picks:
            the ids of a row ascend when they are read. "ordered" keeps the order, at about a fifth more bytes.
        overwrite: whether an existing file may be replaced.

    Raises:
        TraceFileError: when `path` exists and `overwrite` is False, or cannot be written: what was there is whole.
        TraceContentError: when a row cannot be true, the encoding is unknown, or the header would take more than 1 MiB.
    """
    return FORMAT.write(path, *encode(trace, encoding), overwrite=overwrite)


def encode(trace: RoutingTrace, encoding: Encoding) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Return metadata and tensors of the file of a trace, as `FORMAT` takes them. Arguments and errors as in `save`."""
    import zstandard  # an engine's worker imports this room, and has numpy alone

    if encoding not in ENCODINGS:
        raise TraceContentError(f"encoding {encoding!r:.40} is unknown; expected one of {', '.join(ENCODINGS)}")
    _refuse_what_no_reader_takes(trace)
    if encoding == "sets" and trace.pick_order_kept and any(isinstance(s, GateWeights) for s in trace.streams.values()):
        trace = trace.without_pick_order()  # the weights lie in the order of the picks
    spec, streams = trace.spec, dict(sorted(trace.streams.items()))
    as_sets = encoding == "sets" or not trace.pick_order_kept
    if not as_sets:
        check_rows(trace.expert_ids_NLK, trace.valid_N, trace.offsets, spec)
    chunks = cut_chunks(trace)
    frames, ends, sizes = bytearray(), [0], []
    compress = zstandard.ZstdCompressor(level=1, write_checksum=True).compress
    for start, stop in pairwise(as_offsets(chunks).tolist()):
        contents = [_row_content(trace, start, stop), *_route_contents(trace, start, stop, as_sets)]
        for stream in streams.values():
            contents += stream.contents(start, stop)
        for content in contents:
            sizes.append(content.nbytes)
            frames += compress(content.data)
            ends.append(len(frames))
    shape = (len(chunks), 1 + spec.num_layers + sum(stream.depth for stream in streams.values()))
    check_memory(sum(sizes), len(frames))
    layers = [[each.index, each.kind.value, spec.num_experts, spec.top_k] for each in spec.layers]
    stored = [{"name": name, "kind": stream.kind, **stream.facts()} for name, stream in streams.items()]
    metadata = {
        "model": spec.model,
        "layers": json.dumps(layers),
        "encoding": "sets" if as_sets else "ordered",
        "streams": json.dumps(stored),
        "provenance": json.dumps(dict(sorted(trace.provenance.items()))),
    }
    most = FORMAT.most_header_bytes - 4096  # which is more than the entries of the tensors take
    if (header := sum(len(json.dumps(text)) for text in metadata.values())) > most:
        raise TraceContentError(f"the header would take {header} bytes, expected {most} at most; shorten the facts")
    return metadata, {
        "lengths": np.diff(trace.offsets),
        "chunk_rows": chunks,
        "frame_bytes": np.diff(ends).reshape(shape),
        "content_bytes": np.array(sizes, np.int64).reshape(shape),
        FRAMES: np.frombuffer(frames, np.uint8),
    }


def _refuse_what_no_reader_takes(trace: RoutingTrace) -> None:
    """Refuse what a reader would refuse: a constructed trace was never checked."""
    spec = trace.spec
    if not is_text(spec.model):
        raise TraceContentError(f"the model's name is {spec.model!r:.80}; expected text")
    for key, value in trace.provenance.items():
        if not (is_text(key) and is_text(value)):
            raise TraceContentError(f"provenance has {key!r:.40} = {value!r:.80}; expected texts")
    as_tokens(trace.token_ids_N, name="token_ids_N")
    as_versions(trace.weight_versions_N, name="weight_versions_N")
    if (trace.weight_versions_N[~trace.valid_N] != NO_VERSION).any():
        raise TraceContentError("a row without routes states a weight version; expected NO_VERSION")
    expected = (len(trace.valid_N), spec.num_layers, spec.top_k)
    if trace.expert_ids_NLK.shape != expected or trace.expert_ids_NLK.dtype != spec.id_dtype:
        found = f"{trace.expert_ids_NLK.dtype} of shape {trace.expert_ids_NLK.shape}"
        raise TraceContentError(f"the routes are {found}; expected {spec.id_dtype} of shape {expected}")
    if len(trace.streams) > MOST_STREAMS:
        raise TraceContentError(f"the trace has {len(trace.streams)} streams; expected {MOST_STREAMS} at most")
    for name, stream in trace.streams.items():
        trace.with_stream(name, stream)


def cut_chunks(trace: RoutingTrace) -> NDArray[np.int64]:
    """Return the rows of each chunk, int64 [C].

    A chunk has whole sequences, so that they are read alone: up to `CHUNK_ROWS` rows, or `MOST_CHUNK_ROWS` while each
    begins as the one before, by a quarter of the shorter: only within a frame does zstd find a prompt again. A
    sequence that is longer still is cut into about even chunks.
    """
    offsets, tokens = trace.offsets.tolist(), trace.token_ids_N
    arrays = [trace.expert_ids_NLK, *(a for stream in trace.streams.values() for a in stream.arrays().values())]
    row_bytes = max(1, sum(array.nbytes for array in arrays) // max(1, len(tokens)))
    most = min(MOST_CHUNK_ROWS, max(1, CHUNK_MEMORY // row_bytes))
    cuts = [0]
    for before, start, stop in zip([0, *offsets], offsets, offsets[1:], strict=False):
        if start > cuts[-1] and stop - cuts[-1] > min(CHUNK_ROWS, most):
            alike = min(start - before, stop - start) // 4
            grouped = alike and np.array_equal(tokens[before : before + alike], tokens[start : start + alike])
            if not grouped or stop - cuts[-1] > most:
                cuts.append(start)
        pieces = -(-(stop - cuts[-1]) // most)
        cuts += [cuts[-1] + (stop - cuts[-1]) * piece // pieces for piece in range(1, pieces)]
    return np.diff([*cuts, offsets[-1]] if offsets[-1] > cuts[-1] else cuts)


def _row_content(trace: RoutingTrace, start: int, stop: int) -> NDArray[np.uint8]:
    numbers = np.stack([trace.token_ids_N[start:stop], trace.weight_versions_N[start:stop]])
    return np.append(to_bytes(numbers), trace.valid_N[start:stop].view(np.uint8))


def _route_contents(trace: RoutingTrace, start: int, stop: int, as_sets: bool) -> NDArray[np.uint8]:
    """Return what the frames of the routes of a chunk hold: uint8 [L, planes of K numbers, R]."""
    spec, rows, absent = trace.spec, stop - start, np.flatnonzero(~trace.valid_N[start:stop])
    columns = transposed(trace.expert_ids_NLK[start:stop].reshape(rows, -1))
    columns[:, absent] = 0
    columns_LKR = columns.reshape(spec.num_layers, spec.top_k, rows)
    if as_sets:
        ids = sorted_columns(columns_LKR.swapaxes(0, 1))
        columns_LKR = np.empty_like(columns_LKR)  # the gaps; what was there is scratch of the sorting
        columns_LKR[:, 0] = ids[0]
        for k in range(1, spec.top_k):
            np.subtract(ids[k], ids[k - 1], out=columns_LKR[:, k])
        columns_LKR[:, :, absent] = 1
        if not columns_LKR[:, 1:].all() or ids[-1].max() >= spec.num_experts:
            check_rows(trace.expert_ids_NLK, trace.valid_N, trace.offsets, spec)  # names the row
        columns_LKR[:, 1:] -= 1
        columns_LKR[:, 0, absent] = 0
    return to_bytes(columns_LKR)


@dataclass(frozen=True)
class TraceHeader:
    """What a file says about itself. N rows in C chunks of F frames.

    Attributes:
        spec: the model.
        as_sets: whether ids are gaps of sorted ids; else they are in pick order.
        provenance: what made the trace.
        streams: those beside the routes by name, without rows.
        offsets: int64 [S + 1], the rows of each sequence.
        chunk_starts: int64 [C + 1], the rows of each chunk.
        frame_ends: int64 [C, F], where each frame ends in the tensor of frames.
        frame_bytes: int64 [C, F], its bytes.
        content_bytes: int64 [C, F], and those of what it holds.
    """

    spec: RoutingSpec
    as_sets: bool
    provenance: Mapping[str, str]
    streams: Mapping[str, Stream]
    offsets: NDArray[np.int64]
    chunk_starts: NDArray[np.int64]
    frame_ends: NDArray[np.int64]
    frame_bytes: NDArray[np.int64]
    content_bytes: NDArray[np.int64]


def load(
    source: str | os.PathLike[str] | ByteSource,
    *,
    sequences: ArrayLike | None = None,
    layers: Iterable[RoutedLayer] | None = None,
    streams: Iterable[str] | None = None,
) -> RoutingTrace:
    """Read a trace, or the sequences, layers and streams that a rank needs, and check every byte that is used.

    Reading a part gives what `load(source).select(sequences).select_layers(layers)` gives, and reads the frames that
    hold those sequences, in those layers alone.

    Args:
        source: a file written by `save`, or any `foreroute.files.ByteSource` that holds one.
        sequences: integers [S'], each from 0 to S - 1; all in order when left out.
        layers: members of the file's layer table; all in order when left out.
        streams: names of those wanted beside the routes; all when left out. Others are not read.

    Raises:
        TraceFileError: when the file is missing, not a trace, of another format, truncated or damaged.
        TraceContentError: when a sequence or a stream is not in the file, or no layer is asked for.
        SpecMismatchError: when a layer is not in the file.
    """
    with TensorFile(source, TraceFileError, most_header_bytes=FORMAT.most_header_bytes) as file:
        if "foreroute.generation" in file.metadata:
            beside = file.metadata.get("foreroute.trace", "")
            raise TraceFileError(f"{file.name} is a generation, whose trace is {beside!r:.120} in the same folder")
        metadata, tables = FORMAT.read_opened(file)
        try:
            header = _header_from(metadata, tables, file.tensors[FRAMES].shape[0])
        except TraceContentError as error:
            raise _damage(file, error) from error
        count = len(header.offsets) - 1
        chosen = np.arange(count) if sequences is None else as_sequence_numbers(sequences, count)
        spec = header.spec if layers is None else replace(header.spec, layers=as_layers(layers))
        wanted = list(header.streams) if streams is None else list(streams)
        if missing := [name for name in wanted if name not in header.streams]:
            raise TraceContentError(
                f"{file.name} has no stream {missing[0]!r:.40}; it has {', '.join(header.streams) or 'routes alone'}"
            )
        starts, lengths = header.offsets[chosen], np.diff(header.offsets)[chosen]
        filled = lengths > 0
        chunks, starts = _chunks_of(header.chunk_starts, starts[filled], lengths[filled])
        try:
            trace = _read_chunks(file, header, chunks, spec, wanted)
        except TraceContentError as error:
            raise _damage(file, error) from error
    rows = join_ranges(starts, lengths[filled])
    if np.array_equal(rows, np.arange(trace.num_rows)):  # as they were read, which is no reason to copy them
        return replace(trace, offsets=as_offsets(lengths))
    return trace.take_rows(rows, lengths)


def _damage(file: TensorFile, error: TraceContentError) -> TraceFileError:
    return TraceFileError(f"{file.name} is damaged: {error}. Record or copy it again")


def _header_from(metadata: Mapping[str, str], tables: Mapping[str, NDArray[Any]], stored_bytes: int) -> TraceHeader:
    """Check what a file says of itself, and of the bytes of its frames.

    Raises:
        TraceContentError: when it cannot be right.
    """
    table = parse_json(metadata["layers"], TraceContentError, name="its layer table")
    entries = parse_json(metadata["streams"], TraceContentError, name="its list of streams")
    provenance = parse_json(metadata["provenance"], TraceContentError, name="its provenance")
    if not isinstance(provenance, dict) or not all(map(is_text, [*provenance, *provenance.values()])):
        raise TraceContentError(f"provenance is {provenance!r:.80}; expected a table of texts")
    if metadata["encoding"] not in ENCODINGS:
        raise TraceContentError(f"encoding {metadata['encoding']!r:.40} is unknown; expected one of {ENCODINGS}")
    spec = _spec_from(table, metadata["model"])
    streams = _streams_from(entries, spec)
    rows, frame_bytes, content_bytes = tables["chunk_rows"], tables["frame_bytes"], tables["content_bytes"]
    # no length is below 0, and no sum of them wraps
    offsets, chunk_starts = as_offsets(tables["lengths"]), as_offsets(rows)
    frame_ends, content_ends = as_offsets(frame_bytes.reshape(-1)), as_offsets(content_bytes.reshape(-1))
    if offsets[-1] != chunk_starts[-1] or (rows < 1).any() or (rows > MOST_CHUNK_ROWS).any():
        raise TraceContentError(
            f"chunks have {chunk_starts[-1]} rows, and sequences {offsets[-1]}; expected as many, in chunks of 1 to "
            f"{MOST_CHUNK_ROWS} rows"
        )
    shape = (len(rows), 1 + spec.num_layers + sum(stream.depth for stream in streams.values()))
    if frame_bytes.shape != shape:
        raise TraceContentError(f"the tables of frames have the shape {frame_bytes.shape}; expected {shape}")
    if frame_ends[-1] != stored_bytes:
        raise TraceContentError(f"frames have {frame_ends[-1]} bytes by their table, and {stored_bytes} are there")
    # what is known of the sizes is compared before anything is read or memory is taken for it
    known = np.array([ROW_BYTES, *[spec.top_k * spec.id_dtype.itemsize] * spec.num_layers])
    if (content_bytes[:, : len(known)] != rows[:, None] * known).any():
        raise TraceContentError("a frame of tokens or routes has another size than its rows take")
    check_memory(int(content_ends[-1]), stored_bytes)
    return TraceHeader(
        spec=spec,
        as_sets=metadata["encoding"] == "sets",
        provenance=provenance,
        streams=streams,
        offsets=offsets,
        chunk_starts=chunk_starts,
        frame_ends=frame_ends[1:].reshape(shape),
        frame_bytes=frame_bytes,
        content_bytes=content_bytes,
    )


def _spec_from(table: Any, model: str) -> RoutingSpec:
    if not isinstance(table, list) or not all(isinstance(entry, list) and len(entry) == 4 for entry in table):
        raise TraceContentError(f"the layer table is {table!r:.80}; expected a list of [number, kind, experts, picks]")
    layers = layers_from([entry[:2] for entry in table])
    sizes = [entry[2:] for entry in table]
    if any(size != sizes[0] for size in sizes):
        raise TraceContentError("its layers have different numbers of experts or picks, which no trace can hold yet")
    num_experts, top_k = sizes[0] if sizes else (1, 1)  # without a layer, there is no model to refuse
    return RoutingSpec(num_experts, top_k, layers, model)


def _streams_from(entries: Any, spec: RoutingSpec) -> dict[str, Stream]:
    """Return the streams that a file names, without rows."""
    if not isinstance(entries, list) or len(entries) > MOST_STREAMS:
        raise TraceContentError(f"the list of streams is {entries!r:.80}; expected a list of {MOST_STREAMS} at most")
    streams: dict[str, Stream] = {}
    for entry in entries:
        facts = dict(entry) if isinstance(entry, dict) else {}
        name, kind = facts.pop("name", None), facts.pop("kind", None)
        if not isinstance(name, str) or not isinstance(kind, str) or kind not in KINDS or name in streams:
            raise TraceContentError(
                f"a stream is {entry!r:.120}; expected a name of its own and one of {', '.join(KINDS)}"
            )
        streams[name] = KINDS[kind].from_facts(facts, spec)
        streams[name].check_name(name)
    return streams


def _chunks_of(
    chunk_starts: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the chunks that hold ranges of rows.

    Returns:
        chunks: int64 [C'], their numbers, ascending.
        starts: int64 [S'], where each range begins among the rows of those chunks, joined.
    """
    first = np.searchsorted(chunk_starts, starts, side="right") - 1
    after = np.searchsorted(chunk_starts, starts + lengths, side="left")
    # +1 where a range comes to its first chunk, -1 behind its last one: the sum so far is the ranges that touch a chunk
    change = np.zeros(len(chunk_starts), np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, after, -1)
    touched = np.cumsum(change)[:-1] > 0
    # A range lies within chunks that are all read, so that its rows stay neighbours.
    rows_before = as_offsets(np.where(touched, np.diff(chunk_starts), 0))
    return np.flatnonzero(touched), rows_before[first] + starts - chunk_starts[first]


def _read_chunks(
    file: TensorFile,
    header: TraceHeader,
    chunks: NDArray[np.int64],
    spec: RoutingSpec,
    wanted: Sequence[str],
) -> RoutingTrace:
    """Read all rows of some chunks, in the layers of `spec`, with some streams, as one sequence.

    Raises:
        TraceFileError: when the file was cut meanwhile.
        TraceContentError: when a frame is damaged, or holds what cannot be true.
    """
    positions = header.spec.positions(spec.layers)
    edges = as_offsets(np.diff(header.chunk_starts)[chunks])
    num_rows = int(edges[-1])
    tokens, versions = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
    valid, ids_NLK = np.empty(num_rows, np.bool_), np.empty((num_rows, spec.num_layers, spec.top_k), spec.id_dtype)
    frames, before = {}, 1 + header.spec.num_layers
    for name, stream in header.streams.items():
        frames[name] = before + stream.frames(positions)
        before += stream.depth
    needed = np.unique(np.concatenate([[0], 1 + positions, *[frames[name] for name in wanted]]))
    empty = {name: header.streams[name].select_layers(positions) for name in wanted}
    parts: dict[str, list[Any]] = {name: [] for name in wanted}
    size = spec.top_k * spec.id_dtype.itemsize
    # one buffer for all chunks: fresh memory for each would cost about as much as decoding into it
    routes = np.empty((spec.num_layers, size * int(np.diff(edges).max(initial=0))), np.uint8)
    for chunk, (a, b) in zip(chunks.tolist(), pairwise(edges.tolist()), strict=True):
        content_of = _read_frames(file, header, chunk, needed)
        tokens[a:b], versions[a:b], valid[a:b] = _rows_from(content_of(0), b - a)
        for layer, frame in enumerate((1 + positions).tolist()):
            routes[layer, : size * (b - a)] = np.frombuffer(content_of(frame), np.uint8)
        _put_routes(routes[:, : size * (b - a)], spec, header.as_sets, valid[a:b], ids_NLK[a:b])
        for name in wanted:
            parts[name].append(empty[name].from_contents(map(content_of, frames[name].tolist()), valid[a:b]))
    return RoutingTrace(
        spec=spec,
        expert_ids_NLK=ids_NLK,
        valid_N=valid,
        token_ids_N=tokens,
        weight_versions_N=versions,
        offsets=np.array([0, num_rows]),
        provenance=header.provenance,
        pick_order_kept=not header.as_sets,
        streams={name: empty[name].join(parts[name]) for name in wanted},
    )


def _read_frames(
    file: TensorFile, header: TraceHeader, chunk: int, needed: NDArray[np.int64]
) -> Callable[[int], bytes]:
    """Read some frames of a chunk, neighbours at once, and return what says what each of them holds."""
    import zstandard

    ends, sizes = header.frame_ends[chunk].tolist(), header.frame_bytes[chunk].tolist()
    stored = {}
    for group in np.split(needed, np.flatnonzero(np.diff(needed) > 1) + 1):
        begin = ends[group[0]] - sizes[group[0]]
        together = file.read(FRAMES, begin, ends[group[-1]]).data
        for frame in group.tolist():
            stored[frame] = together[ends[frame] - sizes[frame] - begin : ends[frame] - begin]

    def content_of(frame: int) -> bytes:
        size = int(header.content_bytes[chunk, frame])
        try:
            # The size that a frame states is compared before it is believed.
            stated = zstandard.get_frame_parameters(stored[frame])
            if not size or stated.content_size != size or not stated.has_checksum:
                raise zstandard.ZstdError(f"it states {stated.content_size} bytes, expected {size} and a checksum")
            return decompressor.decompress(stored[frame], max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise TraceContentError(f"frame {frame} of chunk {chunk} is not what was written ({error})") from error

    decompressor = zstandard.ZstdDecompressor()
    return content_of


def _rows_from(content: bytes, rows: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
    """Return tokens, weight versions and validity of a chunk, checked."""
    held = np.frombuffer(content, np.uint8)
    (tokens, versions), valid = from_bytes(held[: 8 * rows], np.int32, 2, rows), held[8 * rows :]
    if tokens.min() < 0:
        raise TraceContentError(f"a token id is {tokens.min()}; expected 0 or more")
    if valid.max() > 1:
        raise TraceContentError(f"a validity is {valid.max()}; expected 0 or 1")
    if versions.min() < NO_VERSION or (versions[valid == 0] != NO_VERSION).any():
        raise TraceContentError("a weight version is below -1, or stated for a row without routes")
    return tokens, versions, valid == 1


def _put_routes(
    contents: NDArray[np.uint8], spec: RoutingSpec, as_sets: bool, valid_R: NDArray[np.bool_], out_RLK: NDArray[Any]
) -> None:
    """Put the routes of a chunk, uint8 [L, bytes], into their places."""
    from foreroute.trace.kernels import put_sets  # numba is slow to load

    rows, _, top_k = out_RLK.shape
    stored_LKR = from_bytes(contents, spec.id_dtype, top_k, rows)
    if as_sets:
        if not put_sets(stored_LKR, valid_R, spec.num_experts, out_RLK):
            raise TraceContentError("a row has an expert that the model does not have, or ids and no route")
        return
    out_RLK[:] = stored_LKR.transpose(2, 0, 1)
    if out_RLK[~valid_R].any():
        raise TraceContentError("a row without a route has ids; expected zeros")
    check_rows(out_RLK, valid_R, np.array([0, rows]), spec)
