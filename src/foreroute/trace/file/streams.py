"""Streams beside the routes in a trace file: their entries in the header, and their payloads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import TraceContentError
from foreroute.files import TensorFile, parse_json, seal_slices
from foreroute.trace.checks import as_offsets, check_memory, take_ranges
from foreroute.trace.container import GATE_WEIGHTS, STREAM_NAME, RoutingTrace
from foreroute.trace.file.format import CHANGES, FLOATS, MOST_STREAMS, SEAL_BYTES, SETS, STREAM_COUNTS, STREAM_SHAPES
from foreroute.trace.spec import RoutedLayer, RoutingSpec, layers_from
from foreroute.trace.streams import MOST_CHOICES, DecisionStream, as_choices


@dataclass(frozen=True)
class StoredStream:
    """What the header says of a stream: its name and codec, and for sets the choices and the layers that decide."""

    name: str
    codec: str = SETS
    num_choices: int = 0
    layers: tuple[RoutedLayer, ...] = ()

    @property
    def shapes(self) -> dict[str, tuple[str, int]]:
        """Type and axes of each table by its name in the file."""
        shapes = {**STREAM_SHAPES, **({} if self.codec == FLOATS else STREAM_COUNTS)}
        shapes["payloads"] = ("<u8", 1)
        return {f"{self.name}.{table}": shape for table, shape in shapes.items()}

    def payloads(self, tensors: Mapping[str, NDArray[Any]], shape: tuple[int, int], there: int) -> Payloads:
        """Return the tables of the payloads, checked.

        Args:
            tensors: of the file, all tables.
            shape: blocks and routed layers.
            there: words of the payloads.

        Raises:
            TraceContentError: when they do not fit the blocks, the words, or each other.
        """
        table = [tensors[f"{self.name}.{name}"] for name in STREAM_SHAPES]
        payloads = Payloads(f"{self.name}.payloads", *table)
        if self.codec == FLOATS:
            payloads.check(shape, there)
            return payloads
        payloads.check((shape[0], max(1, len(self.layers))), there)
        counts = tensors[f"{self.name}.id_counts"]
        # An id takes a bit at least, but in a set that is like the one before. `check_memory` bounds those.
        most = MOST_CHOICES if self.codec == CHANGES else 64 * payloads.words_BL.astype(np.int64)
        if counts.shape != payloads.words_BL.shape or (counts < 0).any() or (counts > most).any():
            raise TraceContentError(f"id_counts of {self.name} cannot be those of its payloads")
        return payloads


@dataclass(frozen=True)
class Payloads:
    """The coded blocks of the routes or of a stream: one payload for each block and layer, with its seal.

    Attributes:
        tensor: that holds them, block by block, layer by layer.
        words_BL: uint32 [B, L], words of each.
        seals_BL: uint8 [B, L, 16].
    """

    tensor: str
    words_BL: NDArray[np.uint32]
    seals_BL: NDArray[np.uint8]

    def check(self, shape: tuple[int, int], there: int) -> None:
        """Raise `TraceContentError` unless the tables have that shape, and add up to the words that are there."""
        if self.words_BL.shape != shape or self.seals_BL.shape != (*shape, SEAL_BYTES):
            raise TraceContentError(f"payload tables have shape {self.words_BL.shape}, not blocks x layers {shape}")
        if int(self.words_BL.sum(dtype=np.uint64)) != there:
            raise TraceContentError(f"{self.tensor}: payload_words does not add up to the {there} words there are")

    @cached_property
    def _ends_BL(self) -> NDArray[np.int64]:
        return np.cumsum(self.words_BL.reshape(-1), dtype=np.int64).reshape(self.words_BL.shape)

    def read(
        self, file: TensorFile, block: int, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
        """Read the payloads of a block in some layers and verify their seals.

        Returns:
            words: uint64 [Z]. Layers between the wanted ones are among them, being on the way.
            starts: int64 [C], where the payload of each wanted layer begins.
            sizes: int64 [C], its words.

        Raises:
            TraceContentError: when one is not what was sealed.
        """
        low, high = int(positions.min()), int(positions.max()) + 1
        sizes = self.words_BL[block, positions].astype(np.int64)
        first = int(self._ends_BL[block, low]) - int(self.words_BL[block, low])
        words = file.read(self.tensor, first, int(self._ends_BL[block, high - 1]))
        starts = self._ends_BL[block, positions] - sizes - first
        if seal_slices(words, starts, sizes) != self.seals_BL[block, positions].tobytes():
            raise TraceContentError(f"a payload of block {block} is not what was written")
        return words, starts, sizes


@dataclass(frozen=True)
class NeededRows:
    """The rows that a reader wants, and the blocks that hold them.

    Attributes:
        blocks: int64 [B'], the ones to read.
        near_edges: int64 [B' + 1], where the rows of each begin among those of all of them.
        near_N: int64 [N], the row among those that each wanted row is.
    """

    blocks: NDArray[np.int64]
    near_edges: NDArray[np.int64]
    near_N: NDArray[np.int64]


def sealed(coded: Sequence[NDArray[np.uint64]], words_BL: NDArray[np.uint32], prefix: str = "") -> dict[str, Any]:
    """Return the tensors of payloads: joined words, their sizes and their seals, names after `prefix`."""
    payloads = np.concatenate([np.zeros(0, np.uint64), *coded])
    sizes = words_BL.reshape(-1).astype(np.int64)
    seals = np.frombuffer(seal_slices(payloads, np.cumsum(sizes) - sizes, sizes), np.uint8)
    return {
        f"{prefix}payloads": payloads,
        f"{prefix}payload_words": words_BL,
        f"{prefix}payload_seals": seals.reshape(*words_BL.shape, SEAL_BYTES),
    }


def encode_streams(trace: RoutingTrace, blocks: Sequence[NDArray[np.int64]]) -> tuple[str, dict[str, NDArray[Any]]]:
    """Make `foreroute.streams` and the tensors of all streams of a trace.

    Args:
        trace: whose picks are in the order in which they are stored.
        blocks: int64, the rows of the trace that each block stores.

    Raises:
        TraceContentError: when a stream cannot be true.
    """
    entries: list[dict[str, Any]] = []
    tensors: dict[str, NDArray[Any]] = {}
    if len(trace.streams) > MOST_STREAMS - 1:
        raise TraceContentError(f"the trace has {len(trace.streams)} streams; expected {MOST_STREAMS - 1} at most")
    if trace.gate_weights_NLK is not None:
        entries.append({"name": GATE_WEIGHTS, "codec": FLOATS})
        tensors |= _encode_weights(trace, trace.gate_weights_NLK, blocks)
    for name, stream in sorted(trace.streams.items()):
        trace.with_stream(name, stream)  # checks the name and the rows of a constructed trace
        stream.check()
        layers = [[int(layer.index), layer.kind.value] for layer in stream.layers]
        codec = _smaller(stream, blocks)
        entries.append({"name": name, "codec": codec, "num_choices": int(stream.num_choices), "layers": layers})
        tensors |= _encode_sets(name, stream, blocks, codec)
    return json.dumps(entries), tensors


def row_bytes(spec: RoutingSpec, streams: Iterable[StoredStream]) -> int:
    """Return what a row takes in memory: its picks, their weights, and where its sets begin."""
    picks = spec.num_layers * spec.top_k
    beside = [4 * picks if stream.codec == FLOATS else 8 * max(1, len(stream.layers)) for stream in streams]
    return picks * spec.id_dtype.itemsize + sum(beside)


def stored_streams(text: str) -> list[StoredStream]:
    """Read `foreroute.streams`.

    Raises:
        TraceContentError: when it is no list of streams, or names one twice.
    """
    entries = parse_json(text, TraceContentError, name="foreroute.streams")
    if not isinstance(entries, list) or len(entries) > MOST_STREAMS:
        raise TraceContentError(f"foreroute.streams is {text!r:.80}; expected a list of {MOST_STREAMS} at most")
    streams = [_stored(entry) for entry in entries]
    if len({stream.name for stream in streams}) != len(streams):
        raise TraceContentError(f"foreroute.streams names a stream twice: {text!r:.200}")
    return streams


def _stored(entry: Any) -> StoredStream:
    if entry == {"name": GATE_WEIGHTS, "codec": FLOATS}:
        return StoredStream(GATE_WEIGHTS, FLOATS)
    named = isinstance(entry, dict) and set(entry) == {"name", "codec", "num_choices", "layers"}
    name = entry["name"] if named else None
    if (
        not isinstance(name, str)
        or not STREAM_NAME.fullmatch(name)
        or name == GATE_WEIGHTS
        or entry["codec"] not in (SETS, CHANGES)
    ):
        raise TraceContentError(
            f"a stream is {entry!r:.120}; expected name, codec {SETS!r} or {CHANGES!r}, num_choices and layers"
        )
    return StoredStream(name, entry["codec"], *as_choices(entry["num_choices"], layers_from(entry["layers"])))


def _encode_weights(
    trace: RoutingTrace, weights_NLK: NDArray[np.float32], blocks: Sequence[NDArray[np.int64]]
) -> dict[str, NDArray[Any]]:
    coded, words_BL = [], np.zeros((len(blocks), trace.spec.num_layers), np.uint32)
    for block, rows in enumerate(blocks):
        routed = rows[trace.valid_N[rows]]
        size = weights_size(len(routed), trace.spec.top_k)
        words_LW = np.zeros((trace.spec.num_layers, size), np.uint64)
        by_layer = weights_NLK[routed].transpose(1, 0, 2).reshape(trace.spec.num_layers, -1)
        words_LW.view("<f4")[:, : by_layer.shape[1]] = by_layer
        words_BL[block] = size
        coded.append(words_LW.reshape(-1))
    return sealed(coded, words_BL, f"{GATE_WEIGHTS}.")


def weights_size(rows: int, top_k: int) -> int:
    """Return the words of a payload of gate weights, with the closing one."""
    return -(-rows * top_k // 2) + 1 if rows else 0


def decode_weights(
    words: NDArray[np.uint64],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    dest: NDArray[np.int64],
    out_NLK: NDArray[np.float32],
) -> None:
    """Put the gate weights of wanted layers of a block into place. Arguments as in `Codec.decode`.

    Raises:
        TraceContentError: when a payload has another size, a weight is not finite, or bits follow the last one.
    """
    top_k, wanted = out_NLK.shape[2], dest >= 0
    size = weights_size(len(dest), top_k)
    if (sizes != size).any():
        raise TraceContentError(f"gate weights take {sizes.tolist()[:4]} words for {len(dest)} rows, expected {size}")
    for layer, start in enumerate(starts.tolist()):
        stored = words[start : start + size].view("<f4")
        weights_RK = stored[: len(dest) * top_k].reshape(-1, top_k)
        if stored[weights_RK.size :].view("<u4").any() or not np.isfinite(weights_RK).all():
            raise TraceContentError("a gate weight is not finite, or bits follow the last one")
        out_NLK[dest[wanted], layer] = weights_RK[wanted]


def _smaller(stream: DecisionStream, blocks: Sequence[NDArray[np.int64]]) -> str:
    """The codec in which the first block with ids takes fewer words."""
    first = next((rows for rows in blocks if stream.counts_ND[rows].any()), np.zeros(0, np.int64))
    return min(SETS, CHANGES, key=lambda codec: len(_encode_sets("", stream, [first], codec)[".payloads"]))


def _encode_sets(
    name: str, stream: DecisionStream, blocks: Sequence[NDArray[np.int64]], codec: str
) -> dict[str, NDArray[Any]]:
    from foreroute.trace.file.codec.rice import write_sets

    depth, counts_ND = stream.depth, stream.counts_ND
    words_BL, ids_BL = np.zeros((len(blocks), depth), np.uint32), np.zeros((len(blocks), depth), np.int64)
    coded = []
    for block, rows in enumerate(blocks):
        if not stream.valid_N[rows].any():
            continue
        ids_BL[block] = counts_ND[rows].sum(axis=0)
        for layer, ids in enumerate(ids_BL[block].tolist()):
            out = np.zeros((34 * ids + 128 * len(rows)) // 64 + 3, np.uint64)
            fixed = stream.num_choices, codec == CHANGES, out
            bits = write_sets(stream.offsets, stream.ids, stream.valid_N, rows, depth, layer, *fixed)
            words_BL[block, layer] = -(-bits // 64) + 1
            coded.append(out[: words_BL[block, layer]].copy())
    return {**sealed(coded, words_BL, f"{name}."), f"{name}.id_counts": ids_BL}


def read_sets_of(
    file: TensorFile,
    stored: StoredStream,
    payloads: Payloads,
    ids_BD: NDArray[np.int64],
    needed: NeededRows,
    stored_bytes: int,
) -> DecisionStream:
    """Read the wanted rows of a stream of sets.

    Args:
        file: the trace file.
        stored: the stream.
        payloads: of the stream, checked.
        ids_BD: int64 [B, D], the ids in each, checked.
        needed: the rows.
        stored_bytes: of the file, which bounds what it may ask for.

    Raises:
        TraceContentError: when something is not what was sealed, cannot be true, or would take too much memory.
    """
    from foreroute.trace.file.codec.rice import ABSENT, read_sets

    blocks, near_edges, near_N = needed.blocks, needed.near_edges, needed.near_N
    positions = np.arange(max(1, len(stored.layers)))
    check_memory(4 * int(ids_BD[blocks].sum()), stored_bytes)
    ids = np.zeros(int(ids_BD[blocks].sum()), np.int32)
    counts_ND = np.full((int(near_edges[-1]), len(positions)), ABSENT, np.int64)
    starts_ND = np.zeros_like(counts_ND)
    filled, fixed = 0, (stored.num_choices, stored.codec == CHANGES)
    # The `filled` ids of the payloads before lie payload by payload; the rows of one begin where `starts_ND` says.
    for block, first, after in zip(blocks.tolist(), near_edges[:-1].tolist(), near_edges[1:].tolist(), strict=True):
        words, starts, sizes = payloads.read(file, block, positions)
        if not sizes.any():
            if ids_BD[block].any():
                raise TraceContentError(f"block {block} of {stored.name} has ids and no payload")
            continue
        for layer, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
            counts, there = np.zeros(after - first, np.int64), int(ids_BD[block, layer])
            mine = ids[filled : filled + there]
            if not size or not read_sets(words[start : start + size], *fixed, counts, mine):
                raise TraceContentError(f"a payload of {stored.name} in block {block} does not decode")
            counts_ND[first:after, layer] = counts
            starts_ND[first:after, layer] = filled + as_offsets(np.maximum(counts, 0))[:-1]
            filled += there
    absent_ND = counts_ND == ABSENT
    if (absent_ND != absent_ND[:, :1]).any():
        raise TraceContentError(f"a row of {stored.name} has a decision in some layers and none in others")
    counts = np.where(absent_ND, 0, counts_ND)[near_N].reshape(-1)
    offsets = as_offsets(counts)
    check_memory(4 * int(offsets[-1]), stored_bytes)
    taken = take_ranges(ids, starts_ND[near_N].reshape(-1), counts)
    return DecisionStream(stored.num_choices, ~absent_ND[near_N, 0], offsets, taken, stored.layers)
