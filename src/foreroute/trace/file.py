"""Traces on disk, format 3: one safetensors file, written whole or not at all, read whole or in part.

    header      the model and its layers, what made the trace, and one checksum over all that is small
    lengths     sequence 0 has 700 rows, sequence 1 has 512, ...
    chunks      chunk 0: rows 0 .. 15871      chunk 1: rows 15872 .. 32103 ...     cut where sequences begin
    frames      chunk 0: rows, layer 0, layer 1, ..., streams      chunk 1: rows, layer 0, ...
                each a zstd frame with a checksum of its own

A frame holds the rows of one chunk in one layer as planes of bytes: the low bytes of the first number of all rows, then
their next bytes, and so on. What is alike lies side by side, so that zstd sees few kinds of bytes at a time, and finds
rows that were there before. The first frame of a chunk has what does not depend on the layer: tokens, weight versions
and validity. A reader of some sequences and layers finds the chunks of the sequences, and there the frames of the
layers. A prompt that responses share is stored again with each; zstd finds it. `docs/formats.md` is the whole format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.checks import as_numbers
from foreroute.errors import TraceContentError, TraceFileError, shown
from foreroute.files.container import FileFormat, TensorFile, TensorSchema
from foreroute.files.regular import parse_json
from foreroute.kernels import BOOL, INT, ArrayOf, compiled
from foreroute.trace.checks import as_offsets, check_rows, join_ranges
from foreroute.trace.container import NO_VERSION, RoutingTrace
from foreroute.trace.spec import ID_TYPES, RoutedLayer, RoutingSpec, spec_from
from foreroute.trace.streams import DecisionStream, check_name

Encoding = Literal["sets", "ordered"]
"""Form of a row's picks in a file: as a set, or in pick order."""
ENCODINGS: tuple[Encoding, ...] = ("sets", "ordered")
"""All of them, the default first."""
FRAMES = "frames"
SETS = "sets"
"""Content of every stream: a set of ids for each row and layer."""
FORMAT = FileFormat(
    name="trace",
    version=3,
    error=TraceFileError,
    metadata=("model", "layers", "encoding", "streams", "provenance"),
    tensors={
        "lengths": TensorSchema("I64", "S", sizes=True),
        "chunk_rows": TensorSchema("I64", "C", sizes=True),
        "frame_bytes": TensorSchema("U16 U32 I64", "CF", sizes=True),
        "content_bytes": TensorSchema("U16 U32 I64", "CF", sizes=True),
        FRAMES: TensorSchema("U8", "Z"),
    },
    made_by="foreroute.save writes traces, and foreroute convert makes one of an engine's answer; what an earlier "
    "foreroute wrote must be recorded again",
    apart=(FRAMES,),
    together={
        "prompt_lengths": TensorSchema("I64", "S"),
        "sampled": TensorSchema("BOOL", "N"),
        "logprobs": TensorSchema("F32", "R"),
    },
)
"""S sequences, C chunks, F frames in a chunk, Z bytes of all frames. `frames` are read in part: each has a checksum.
What `together` names makes a generation of a trace, as `foreroute.capture.save_generation` writes it."""
CHUNK_ROWS, MOST_CHUNK_ROWS = 1 << 14, 1 << 16
"""Rows that a chunk aims at, and has at most. From 4,096 to 32,768 the size of a file changes by less than a
hundredth. With fewer rows frames cost more time each, with more a reader of few sequences decodes more that it does not
need. A plane of 65,536 bytes and all of its frame lie within zstd's window."""
READ_BYTES = 1 << 22
"""Frames of small chunks are read together, up to about this many bytes."""
CHUNK_MEMORY = 1 << 26
"""Bytes that the rows of a chunk take in memory, if that is less: choices of indexers take half a megabyte for each."""
ROW_BYTES, MOST_STREAMS = 9, 16
"""Bytes of a row in the first frame: 4 of the token, 4 of the weight version, 1 of validity. Streams of a trace."""
DECODED_FREELY, DECODED_PER_BYTE = 64 << 20, 1024
"""A file may ask for 64 MiB of memory, or for 1,024 times the bytes of its frames: so a small file cannot make a reader
allocate without bound."""
_BOOLS = ArrayOf(np.bool_, 1)
_gaps_of_rows, _put_sets = (
    {
        dtype: compiled(f"{loop}_{dtype}", ArrayOf(dtype, 3), _BOOLS, INT, ArrayOf(dtype, 3, filled=True), returns=BOOL)
        for dtype in ID_TYPES
    }
    for loop in ("gaps_of_rows", "put_sets")
)


def save(
    trace: RoutingTrace, path: str | os.PathLike[str], *, encoding: Encoding = "sets", overwrite: bool = False
) -> Path | str:
    """Write `trace` to `path`: the whole file or nothing. Equal traces give equal bytes.

    Args:
        trace: what to write.
        path: a path, or a URL that fsspec knows, such as "s3://bucket/step-000007".
        encoding: "sets" keeps which experts were picked, and drops the order of picks: the ids of a row ascend when
            they are read. "ordered" keeps the order, at about a fifth more bytes.
        overwrite: whether an existing file may be replaced.

    Returns:
        The path, or the URL.

    Raises:
        TraceFileError: when `path` exists and `overwrite` is False, or cannot be written: what was there is whole.
        TraceContentError: when a row cannot be true, the encoding is unknown, or the header would take more than 1 MiB.
    """
    if not isinstance(trace, RoutingTrace):
        raise TraceContentError(
            f"what is to be saved is a {type(trace).__name__}; expected a RoutingTrace, as generation.trace is. "
            "capture.save_generation writes a generation whole"
        )
    return FORMAT.write(path, *encode(trace, encoding), overwrite=overwrite)


def encode(
    trace: RoutingTrace, encoding: Encoding, *, chunk_rows: int | None = None
) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Return metadata and tensors of the file of a trace, as `FORMAT` takes them; `chunk_rows` as in `cut_chunks`."""
    import zstandard  # an engine's worker imports this room, and has numpy alone

    if encoding not in ENCODINGS:
        raise TraceContentError(f"encoding {shown(encoding)} is unknown; expected one of {', '.join(ENCODINGS)}")
    _refuse_what_no_reader_takes(trace)
    spec, streams = trace.spec, dict(sorted(trace.streams.items()))  # sorted: equal traces give equal bytes
    as_sets = encoding == "sets" or not trace.pick_order_kept
    if not as_sets or spec.sizes:
        check_rows(trace.expert_ids_NLK, trace.valid_N, trace.offsets, spec)
    chunks = cut_chunks(trace, chunk_rows)
    frames, ends, sizes = bytearray(), [0], []
    scratch = np.empty(spec.num_layers * spec.top_k * int(chunks.max(initial=0)), spec.id_dtype)
    compress = zstandard.ZstdCompressor(level=1, write_checksum=True).compress
    for start, stop in pairwise([0, *np.cumsum(chunks).tolist()]):
        numbers = np.stack([trace.token_ids_N[start:stop], trace.weight_versions_N[start:stop]])
        contents: list[list[NDArray[Any]]] = [[numbers, trace.valid_N[start:stop].view(np.uint8)]]
        contents += [[columns_KR] for columns_KR in _route_columns(trace, start, stop, as_sets, scratch)]
        for stream in streams.values():
            contents += map(list, stream.contents(start, stop))
        for columns in contents:
            content = _planes(columns)
            sizes.append(content.nbytes)
            frames += compress(content.data)
            ends.append(len(frames))
    shape = (len(chunks), 1 + spec.num_layers + sum(stream.depth for stream in streams.values()))
    check_memory(sum(sizes) + memory_behind(spec, len(trace.valid_N)), len(frames))
    table = zip(spec.layers, spec.sizes_L, strict=True)
    metadata = {
        "model": spec.model,
        "layers": json.dumps([[layer.index, layer.kind.value, *size] for layer, size in table]),
        "encoding": "sets" if as_sets else "ordered",
        "streams": json.dumps([{"name": name, "kind": SETS, **each.facts()} for name, each in streams.items()]),
        "provenance": json.dumps(dict(sorted(trace.provenance.items()))),
    }
    most = FORMAT.most_header_bytes - 4096  # which is more than the entries of the tensors take
    if (header := sum(len(json.dumps(text)) for text in metadata.values())) > most:
        raise TraceContentError(f"the header would take {header} bytes, expected {most} at most; shorten the facts")
    return metadata, {
        "lengths": np.diff(trace.offsets),
        "chunk_rows": chunks,
        "frame_bytes": _narrow(np.diff(ends).reshape(shape)),
        "content_bytes": _narrow(np.array(sizes, np.int64).reshape(shape)),
        FRAMES: np.frombuffer(frames, np.uint8),
    }


def _narrow(sizes: NDArray[np.int64]) -> NDArray[Any]:
    """Return the sizes in 16 or 32 bits, if those hold them: every reader of a part reads all of this table."""
    most = int(sizes.max(initial=0))
    return sizes.astype(np.uint16 if most < 1 << 16 else np.uint32 if most < 1 << 32 else np.int64)


def _refuse_what_no_reader_takes(trace: RoutingTrace) -> None:
    """Refuse what a reader would refuse, but for routes, which are checked as they are encoded."""
    spec, rows = trace.spec, len(trace.valid_N)
    _refuse_no_texts(spec.model, trace.provenance)
    for name, dtype, shape in (
        ("token_ids_N", np.int32, (rows,)),
        ("weight_versions_N", np.int32, (rows,)),
        ("expert_ids_NLK", spec.id_dtype, (rows, spec.num_layers, spec.top_k)),
    ):
        array, expected = getattr(trace, name), f"{np.dtype(dtype)} of shape {shape}"
        if (found := f"{array.dtype} of shape {array.shape}") != expected:
            raise TraceContentError(f"{name} is {found}; expected {expected}")
    _refuse_false_rows(trace.token_ids_N, trace.weight_versions_N, trace.valid_N)
    if len(trace.streams) > MOST_STREAMS:
        raise TraceContentError(f"the trace has {len(trace.streams)} streams; expected {MOST_STREAMS} at most")
    for name, stream in trace.streams.items():
        trace.with_stream(name, stream)


def _refuse_no_texts(model: str, provenance: Any) -> None:
    """Refuse what is no text, of a trace or of a file: other types, and halves of characters, which have no bytes."""
    try:
        "".join([model, *provenance, *provenance.values()]).encode()
    except (AttributeError, TypeError, UnicodeEncodeError) as error:
        raise TraceContentError(
            f"the model is {shown(model)} and the provenance {shown(provenance)}; expected a text, and a table of texts"
        ) from error


def _refuse_false_rows(tokens: NDArray[np.int32], versions: NDArray[np.int32], valid: NDArray[np.bool_]) -> None:
    """Refuse what no row has, of a trace or of a file: a negative token, a version beside no route."""
    if tokens.min(initial=0) < 0:
        raise TraceContentError(f"a token id is {tokens.min()}; expected 0 or more")
    if versions.min(initial=NO_VERSION) < NO_VERSION or (versions[~valid] != NO_VERSION).any():
        raise TraceContentError("a weight version is below -1, or stated for a row without routes")


def stored_type(num_experts: int) -> Any:
    """Return the type of the ids of a layer in a file."""
    return np.uint8 if num_experts <= 256 else np.uint16


def row_bytes(spec: RoutingSpec) -> NDArray[np.int64]:
    """Return the bytes that the routes of a row take in each layer's frame, int64 [L]."""
    bytes_L = np.empty(spec.num_layers, np.int64)
    for num_experts, top_k, at in spec.layers_by_size:
        bytes_L[at] = top_k * np.dtype(stored_type(num_experts)).itemsize
    return bytes_L


def memory_behind(spec: RoutingSpec, num_rows: int) -> int:
    """Return the bytes that arrays of equal layers take beyond what frames hold, where layers differ in E or K."""
    return num_rows * (spec.num_layers * spec.top_k * spec.id_dtype.itemsize - int(row_bytes(spec).sum()))


def check_memory(decoded_bytes: int, stored_bytes: int) -> None:
    """Raise `TraceContentError` when what a file holds would take far more memory than the file has bytes of frames."""
    if decoded_bytes > max(DECODED_FREELY, DECODED_PER_BYTE * stored_bytes):
        raise TraceContentError(f"{stored_bytes} bytes of frames would become {decoded_bytes} bytes")


def cut_chunks(trace: RoutingTrace, chunk_rows: int | None = None) -> NDArray[np.int64]:
    """Return the rows of each chunk, int64 [C]; with `chunk_rows`, a chunk ends once it has that many."""
    offsets, tokens = trace.offsets.tolist(), trace.token_ids_N
    arrays = [trace.expert_ids_NLK, *(a for stream in trace.streams.values() for a in stream.arrays().values())]
    row_bytes = max(1, sum(array.nbytes for array in arrays) // max(1, len(tokens)))
    most = min(MOST_CHUNK_ROWS, max(1, CHUNK_MEMORY // row_bytes))
    # Sequences are whole in a chunk, so that they are read alone. A chunk grows while each begins as the one before:
    # only within a frame does zstd find a prompt again.
    cuts = [0]
    for before, start, stop in zip([0, *offsets], offsets, offsets[1:], strict=False):
        if chunk_rows is not None and start - cuts[-1] >= chunk_rows:
            cuts.append(start)
        elif start > cuts[-1] and stop - cuts[-1] > min(CHUNK_ROWS, most):
            alike = min(start - before, stop - start) // 4
            grouped = alike and np.array_equal(tokens[before : before + alike], tokens[start : start + alike])
            if not grouped or stop - cuts[-1] > most:
                cuts.append(start)
        # a sequence that no chunk can hold is cut into about even ones
        pieces = -(-(stop - cuts[-1]) // most)
        cuts += [cuts[-1] + (stop - cuts[-1]) * piece // pieces for piece in range(1, pieces)]
    return np.diff([*cuts, offsets[-1]] if offsets[-1] > cuts[-1] else cuts)


def _route_columns(
    trace: RoutingTrace, start: int, stop: int, as_sets: bool, scratch: NDArray[Any]
) -> list[NDArray[Any]]:
    """Return the numbers in the frame of each layer of a chunk: uint8 or uint16 [K, R]. Sets are checked here."""
    spec, valid = trace.spec, np.ascontiguousarray(trace.valid_N[start:stop])
    columns: dict[int, NDArray[Any]] = {}
    for num_experts, top_k, at in spec.layers_by_size:
        dtype = stored_type(num_experts)
        ids_RLK = np.ascontiguousarray(trace.expert_ids_NLK[start:stop, at, :top_k], dtype)
        if as_sets:
            into = np.empty(ids_RLK.size, dtype) if spec.sizes else scratch[: ids_RLK.size]
            columns_LKR = into.reshape(-1, top_k, stop - start)
            if not _gaps_of_rows[ids_RLK.dtype](ids_RLK, valid, num_experts, columns_LKR):
                check_rows(trace.expert_ids_NLK, trace.valid_N, trace.offsets, spec)  # names the row
        else:
            columns_LKR = np.where(valid, ids_RLK.transpose(1, 2, 0), dtype(0))
        columns |= dict(zip(np.arange(spec.num_layers)[at].tolist(), columns_LKR, strict=True))
    return [columns[layer] for layer in range(spec.num_layers)]


def _planes(columns: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
    """Return what a frame holds of columns of numbers [..., R]: the low bytes of a column, then the next, and so on."""
    planes = []
    for numbers in columns:
        stored = np.ascontiguousarray(numbers, numbers.dtype.newbyteorder("<"))
        split = stored.view(np.uint8).reshape(*numbers.shape, numbers.itemsize)
        planes.append(np.ascontiguousarray(split.swapaxes(-1, -2)).reshape(-1))
    return np.concatenate(planes) if len(planes) > 1 else planes[0]


def _numbers(planes: NDArray[np.uint8], dtype: Any) -> NDArray[Any]:
    """Return the columns [..., R] whose planes these are, uint8 [..., bytes of R numbers]."""
    stored = np.dtype(dtype).newbyteorder("<")
    split = planes.reshape(*planes.shape[:-1], stored.itemsize, -1)
    numbers: NDArray[Any] = np.ascontiguousarray(split.swapaxes(-1, -2)).view(stored)[..., 0].astype(dtype, copy=False)
    return numbers


@dataclass(frozen=True)
class TraceHeader:
    """Header of a trace file. N rows in C chunks of F frames."""

    spec: RoutingSpec  # the model
    as_sets: bool  # whether ids are gaps of sorted ids; else they are in pick order
    provenance: Mapping[str, str]  # what made the trace
    streams: Mapping[str, DecisionStream]  # those beside the routes by name, without rows
    offsets: NDArray[np.int64]  # [S + 1], the rows of each sequence
    chunk_starts: NDArray[np.int64]  # [C + 1], the rows of each chunk
    # [C · F + 1], frame f of chunk c has the bytes from bound c · F + f to the next
    frame_bounds: NDArray[np.int64]
    content_bytes: NDArray[np.int64]  # [C, F], the bytes of what each frame holds


def load(
    source: str | os.PathLike[str] | BinaryIO,
    *,
    sequences: ArrayLike | None = None,
    layers: Iterable[RoutedLayer] | None = None,
    streams: Iterable[str] | None = None,
) -> RoutingTrace:
    """Read a trace, or the sequences, layers and streams that a rank needs, and check every byte that is used.

    A part is `load(source).select(sequences).select_layers(layers)`, for which other frames are not read.

    Args:
        source: the path or the URL of a file that `save` wrote, or such a file that was opened.
        sequences: integers [S'], each from 0 to S - 1; all in order when left out.
        layers: members of the file's layer table; all in order when left out.
        streams: names of those wanted beside the routes; all when left out.

    Raises:
        TraceFileError: when the file is missing, not a trace, of another format, truncated or damaged.
        TraceContentError: when a sequence or a stream is not in the file, or no layer is asked for.
        SpecMismatchError: when a layer is not in the file.
    """
    return read_trace(source, sequences, layers, streams)[0]


def read_trace(
    source: str | os.PathLike[str] | BinaryIO,
    sequences: ArrayLike | None = None,
    layers: Iterable[RoutedLayer] | None = None,
    streams: Iterable[str] | None = None,
    *,
    num_sequences: int | None = None,
) -> tuple[RoutingTrace, dict[str, NDArray[Any]]]:
    """Read as `load`, and return the tensors that are read whole too: of a generation, what it has beside its trace."""
    with FORMAT.open(source) as file:
        metadata, tables = FORMAT.read_opened(file)
        try:
            header = _header_from(metadata, tables, file.tensors[FRAMES].shape[0])
            if num_sequences not in (None, len(header.offsets) - 1):
                raise TraceContentError(f"it has {len(header.offsets) - 1} sequences; expected {num_sequences}")
        except TraceContentError as error:
            raise _damage(file, error) from error
        spec, positions = header.spec, np.arange(header.spec.num_layers)
        if layers is not None:
            spec = header.spec.select(layers)
            positions = header.spec.positions(spec.layers)
        wanted = list(header.streams) if streams is None else list(streams)
        if missing := [name for name in wanted if name not in header.streams]:
            raise TraceContentError(
                f"{file.name} has no stream {shown(missing[0])}; it has {', '.join(header.streams) or 'routes alone'}"
            )
        chunks, rows, lengths = _rows_of(header, sequences)
        try:
            trace = _read_chunks(file, header, chunks, spec, positions, wanted)
        except TraceContentError as error:
            raise _damage(file, error) from error
    if rows is None:
        return replace(trace, offsets=np.append(0, np.cumsum(lengths))), tables
    return trace.take_rows(rows, lengths), tables


def _damage(file: TensorFile, error: TraceContentError) -> TraceFileError:
    """Make the error for a file that cannot be right."""
    return TraceFileError(f"{file.name} is damaged: {error}. Record or copy it again")


def _header_from(metadata: Mapping[str, str], tables: Mapping[str, NDArray[Any]], stored_bytes: int) -> TraceHeader:
    """Check what a file says of itself, and of the bytes of its frames."""
    table = parse_json(metadata["layers"], TraceContentError, name="its layer table")
    entries = parse_json(metadata["streams"], TraceContentError, name="its list of streams")
    provenance = parse_json(metadata["provenance"], TraceContentError, name="its provenance")
    if metadata["encoding"] not in ENCODINGS:
        raise TraceContentError(f"encoding {shown(metadata['encoding'])} is unknown; expected one of {ENCODINGS}")
    spec = spec_from(table, metadata["model"])
    _refuse_no_texts(spec.model, provenance)
    rows = tables["chunk_rows"]
    frame_bytes, content_bytes = (tables[name].astype(np.int64) for name in ("frame_bytes", "content_bytes"))
    streams = _streams_from(entries)
    # what is known of the sizes is compared before anything is read or memory is taken for it
    num_rows = int(rows.sum())
    check_memory(int(content_bytes.sum()) + memory_behind(spec, num_rows), stored_bytes)
    offsets, chunk_starts = np.append(0, np.cumsum(tables["lengths"])), np.append(0, np.cumsum(rows))
    frame_bounds = np.append(0, np.cumsum(frame_bytes))
    if offsets[-1] != chunk_starts[-1] or (rows < 1).any() or (rows > MOST_CHUNK_ROWS).any():
        raise TraceContentError(
            f"chunks have {chunk_starts[-1]} rows, and sequences {offsets[-1]}; expected as many, in chunks of 1 to "
            f"{MOST_CHUNK_ROWS} rows"
        )
    shape = (len(rows), 1 + spec.num_layers + sum(stream.depth for stream in streams.values()))
    if frame_bytes.shape != shape:
        raise TraceContentError(f"the tables of frames have the shape {frame_bytes.shape}; expected {shape}")
    if frame_bounds[-1] != stored_bytes:
        raise TraceContentError(f"frames have {frame_bounds[-1]} bytes by their table, and {stored_bytes} are there")
    known = np.append(ROW_BYTES, row_bytes(spec))
    if (content_bytes[:, : len(known)] != rows[:, None] * known).any():
        raise TraceContentError("a frame of tokens or routes has another size than its rows take")
    return TraceHeader(
        spec=spec,
        as_sets=metadata["encoding"] == "sets",
        provenance=provenance,
        streams=streams,
        offsets=offsets,
        chunk_starts=chunk_starts,
        frame_bounds=frame_bounds,
        content_bytes=content_bytes,
    )


def _streams_from(entries: Any) -> dict[str, DecisionStream]:
    """Return the streams that a file names, without rows."""
    if not isinstance(entries, list) or len(entries) > MOST_STREAMS:
        raise TraceContentError(f"the list of streams is {shown(entries)}; expected a list of {MOST_STREAMS} at most")
    streams: dict[str, DecisionStream] = {}
    for entry in entries:
        facts = dict(entry) if isinstance(entry, dict) else {}
        name, content = facts.pop("name", None), facts.pop("kind", None)
        if content != SETS or not isinstance(name, str) or name in streams:
            raise TraceContentError(f"a stream is {shown(entry)}; expected a name of its own and the kind {SETS!r}")
        check_name(name)
        streams[name] = DecisionStream.from_facts(facts)
    return streams


def _rows_of(
    header: TraceHeader, sequences: ArrayLike | None
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, NDArray[np.int64]]:
    """Find the chunks that hold some sequences, the rows to take of them (None: all, in order), and the lengths."""
    lengths = np.diff(header.offsets)
    if sequences is None:
        return np.arange(len(header.chunk_starts) - 1), None, lengths
    chosen = as_numbers(sequences, name="sequences", below=len(lengths))
    lengths, filled = lengths[chosen], chosen[lengths[chosen] > 0]
    starts, ends = header.offsets[filled], header.offsets[filled + 1]
    first = np.searchsorted(header.chunk_starts, starts, side="right") - 1
    after = np.searchsorted(header.chunk_starts, ends, side="left")
    touched = np.zeros(len(header.chunk_starts) - 1, np.bool_)
    touched[join_ranges(first, after - first)] = True
    # A sequence lies within chunks that are all read, so that its rows stay neighbours.
    rows_before = as_offsets(np.where(touched, np.diff(header.chunk_starts), 0))
    starts_read = rows_before[first] + starts - header.chunk_starts[first]
    in_order = np.array_equal(np.append(starts_read, rows_before[-1]), as_offsets(ends - starts))
    return np.flatnonzero(touched), None if in_order else join_ranges(starts_read, ends - starts), lengths


def _read_chunks(
    file: TensorFile,
    header: TraceHeader,
    chunks: NDArray[np.int64],
    spec: RoutingSpec,
    positions: NDArray[np.int64],
    wanted: Sequence[str],
) -> RoutingTrace:
    """Read all rows of some chunks, in the layers of `spec`, with some streams, as one sequence."""
    edges = np.append(0, np.cumsum(np.diff(header.chunk_starts)[chunks]))
    num_rows, frames, before = int(edges[-1]), {}, 1 + header.spec.num_layers
    tokens, versions = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
    valid, shape = np.empty(num_rows, np.bool_), (num_rows, spec.num_layers, spec.top_k)
    # Not by numpy, which asks for huge pages. To put those together takes the system up to five times as long.
    memory = mmap(-1, max(1, prod(shape)) * spec.id_dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    ids_NLK = np.frombuffer(memory, spec.id_dtype, prod(shape)).reshape(shape)
    for name, stream in header.streams.items():
        frames[name] = before + np.arange(stream.depth)
        before += stream.depth
    needed = np.unique(np.concatenate([[0], 1 + positions, *[frames[name] for name in wanted]]))
    parts: dict[str, list[Any]] = {name: [] for name in wanted}
    # One buffer for the routes of all chunks: fresh memory for each would cost about as much as decoding into it.
    routes = np.empty(int(row_bytes(spec).sum()) * int(np.diff(edges).max(initial=0)), np.uint8)
    all_contents = _read_frames(file, header, chunks, needed)
    for contents, (a, b) in zip(all_contents, pairwise(edges.tolist()), strict=True):
        numbers, validity = np.split(contents[0], [8 * (b - a)])
        tokens[a:b], versions[a:b] = _numbers(numbers.reshape(2, -1), np.int32)
        if validity.max() > 1:
            raise TraceContentError(f"a validity is {validity.max()}; expected 0 or 1")
        valid[a:b] = validity
        _refuse_false_rows(tokens[a:b], versions[a:b], valid[a:b])
        for num_experts, top_k, at in spec.layers_by_size:
            each = [contents[i] for i in 1 + positions[at]]
            planes = np.concatenate(each, out=routes[: sum(map(len, each))])
            columns_LKR = _numbers(planes.reshape(len(each), top_k, -1), stored_type(num_experts))
            if not spec.sizes:
                _put_routes(columns_LKR, valid[a:b], num_experts, header.as_sets, ids_NLK[a:b])
                continue
            ids_RLK = np.empty((b - a, len(each), top_k), columns_LKR.dtype)
            _put_routes(columns_LKR, valid[a:b], num_experts, header.as_sets, ids_RLK)
            ids_NLK[a:b, at, :top_k] = ids_RLK
            ids_NLK[a:b, at, top_k:] = np.where(valid[a:b], spec.filler, 0)[:, None, None]
        for name, found in parts.items():
            columns = (_sizes_and_gaps(contents[f], b - a) for f in frames[name].tolist())
            found.append(header.streams[name].from_contents(columns))
    if not header.as_sets:
        if ids_NLK[~valid].any():
            raise TraceContentError("a row without a route has ids; expected zeros")
        check_rows(ids_NLK, valid, np.array([0, num_rows]), spec)
    joined = {name: header.streams[name].join(found) for name, found in parts.items()}
    bounds, order_kept = np.array([0, num_rows]), not header.as_sets
    return RoutingTrace(spec, ids_NLK, valid, tokens, versions, bounds, header.provenance, order_kept, joined)


def _put_routes(
    columns_LKR: NDArray[Any], valid_R: NDArray[np.bool_], num_experts: int, as_sets: bool, ids_RLK: NDArray[Any]
) -> None:
    """Put the numbers of frames into rows, as ids, and refuse sets that cannot be."""
    if not as_sets:
        ids_RLK[:] = columns_LKR.transpose(2, 0, 1)
    elif not _put_sets[ids_RLK.dtype](columns_LKR, valid_R, num_experts, ids_RLK):
        raise TraceContentError("a row has an expert that the model does not have, or ids and no route")


def _read_frames(
    file: TensorFile, header: TraceHeader, chunks: NDArray[np.int64], needed: NDArray[np.int64]
) -> Iterator[dict[int, NDArray[np.uint8]]]:
    """Read some frames of chunks, and yield what each of them holds, chunk by chunk. Neighbours are read at once."""
    import zstandard

    decompressor, frames = zstandard.ZstdDecompressor(), header.content_bytes.shape[1]
    numbers = chunks[:, None] * frames + needed
    begins, ends = header.frame_bounds[numbers], header.frame_bounds[numbers + 1]
    together = np.cumsum((ends - begins).sum(axis=1)) // READ_BYTES
    for some in np.split(np.arange(len(chunks)), np.flatnonzero(np.diff(together)) + 1):
        stored: list[Any] = []
        bounds = list(zip(begins[some].reshape(-1).tolist(), ends[some].reshape(-1).tolist(), strict=True))
        apart = [i for i in range(1, len(bounds)) if bounds[i][0] != bounds[i - 1][1]]
        for first, after in pairwise([0, *apart, len(bounds)]):
            if first < after:
                start = bounds[first][0]
                read = file.read(FRAMES, start, bounds[after - 1][1]).data
                stored += [read[begin - start : end - start] for begin, end in bounds[first:after]]
        for i, chunk in enumerate(chunks[some].tolist()):
            contents = {}
            for frame, each in zip(needed.tolist(), stored[i * len(needed) :], strict=False):
                size = int(header.content_bytes[chunk, frame])
                try:
                    # The size that a frame states is compared before it is believed.
                    stated = zstandard.get_frame_parameters(each)
                    if not size or stated.content_size != size or not stated.has_checksum:
                        why = f"it states {stated.content_size} bytes, expected {size} and a checksum"
                        raise zstandard.ZstdError(why)
                    content = decompressor.decompress(each, max_output_size=size, allow_extra_data=False)
                except zstandard.ZstdError as error:
                    why = f"frame {frame} of chunk {chunk} is not what was written ({error})"
                    raise TraceContentError(why) from error
                contents[frame] = np.frombuffer(content, np.uint8)
            yield contents


def _sizes_and_gaps(content: NDArray[np.uint8], rows: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return what a frame of a stream holds, unless it is too short for its rows."""
    size = np.dtype(np.uint32).itemsize
    if len(content) < size * rows or len(content) % size:
        raise TraceContentError(f"sets of {rows} rows have {len(content)} bytes; expected {size} per number")
    sizes, gaps = np.split(content, [size * rows])
    return _numbers(sizes, np.uint32), _numbers(gaps, np.uint32)
