"""The head of a trace file: everything but tokens and payloads, written to and checked from safetensors.

`docs/trace-format.md` says what each field means and what a reader must refuse. Not the reading of rows: `trace.file`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import TraceContentError
from foreroute.trace.check import as_offsets, ascending
from foreroute.trace.codec import Codec, decoder
from foreroute.trace.seal import SEAL_BYTES, seal_file
from foreroute.trace.sharing import MAX_EXPANSION, Runs
from foreroute.trace.spec import LayerKind, RoutedLayer, RoutingSpec

FORMAT_VERSION = 1
KEY = "foreroute."
METADATA = tuple(KEY + name for name in ("version", "spec", "codec", "pick_order", "provenance", "digest"))
SHAPES: dict[str, tuple[str, int]] = {
    "run_offsets": ("<i8", 1),
    "run_starts": ("<i8", 1),
    "run_lengths": ("<i8", 1),
    "block_starts": ("<i8", 1),
    "span_starts": ("<i8", 1),
    "span_versions": ("<i4", 1),
    "payload_words": ("<u4", 2),
    "payload_seals": ("|u1", 3),
    "row_seals": ("|u1", 2),
}
BULK = {"token_ids": "I32", "valid_bits": "U8", "payloads": "U64"}
DECODED_FREELY = 64 << 20
DECODED_PER_BYTE = 1024
"""A file may ask for 64 MiB of routes, or for 1,024 times the bytes of its tokens and payloads."""

ORDER = {True: "kept", False: "dropped"}


@dataclass(frozen=True)
class TraceIndex:
    """What a file says about itself. U stored rows in B blocks of L payloads each.

    Attributes:
        spec: the model.
        codec_name: which codec wrote the payloads.
        codec: that codec, with the file's tables.
        pick_order_kept: whether the ids of a row are in pick order.
        provenance: what made the trace.
        runs: how sequences are chained from stored rows.
        block_starts: int64 [B + 1], first stored row of each block, U at the end.
        span_starts: int64 [V], first stored row of each run of one weight version.
        span_versions: int32 [V].
        payload_words: uint32 [B, L].
        payload_seals: uint8 [B, L, 16].
        row_seals: uint8 [B, 16].
    """

    spec: RoutingSpec
    codec_name: str
    codec: Codec
    pick_order_kept: bool
    provenance: Mapping[str, str]
    runs: Runs
    block_starts: NDArray[np.int64]
    span_starts: NDArray[np.int64]
    span_versions: NDArray[np.int32]
    payload_words: NDArray[np.uint32]
    payload_seals: NDArray[np.uint8]
    row_seals: NDArray[np.uint8]

    @property
    def stored_rows(self) -> int:
        """U."""
        return int(self.block_starts[-1])

    def versions(self, start: int, stop: int) -> NDArray[np.int32]:
        """int32 [stop - start], the weight versions of a range of stored rows."""
        first = int(np.searchsorted(self.span_starts, start, side="right")) - 1
        after = int(np.searchsorted(self.span_starts, stop, side="left"))
        edges = np.append(self.span_starts[first:after], stop)
        edges[0] = start
        return np.repeat(self.span_versions[first:after], edges[1:] - edges[:-1])


def write_index(index: TraceIndex) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata, sealed, and small tensors."""
    tensors: dict[str, NDArray[Any]] = {
        "run_offsets": index.runs.offsets,
        "run_starts": index.runs.starts,
        "run_lengths": index.runs.lengths,
        **{name: getattr(index, name) for name in SHAPES if not name.startswith("run_")},
        **index.codec.tables,
    }
    metadata = {
        "foreroute.version": str(FORMAT_VERSION),
        "foreroute.spec": _spec_to_json(index.spec),
        "foreroute.codec": index.codec_name,
        "foreroute.pick_order": ORDER[index.pick_order_kept],
        "foreroute.provenance": json.dumps(dict(index.provenance)),
    }
    return {**metadata, "foreroute.digest": seal_file(metadata, tensors)}, tensors


def read_index(
    metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]], sizes: Mapping[str, int]
) -> TraceIndex:
    """Check and unpack what `write_index` made.

    Args:
        metadata: the file's metadata; keys that do not start with "foreroute." are left alone.
        tensors: every tensor but those of `BULK`.
        sizes: elements of each tensor of `BULK`.

    Raises:
        TraceContentError, KeyError, TypeError, ValueError, RecursionError: when it cannot be right.
    """
    ours = {key: value for key, value in metadata.items() if key.startswith(KEY)}
    there = {*ours, *tensors, *sizes}
    missing = [name for name in (*METADATA, *SHAPES, *BULK) if name not in there]
    if missing or set(ours) - set(METADATA):
        raise TraceContentError(f"missing: {missing}; unknown: {sorted(set(ours) - set(METADATA))}")
    stated = ours.pop("foreroute.digest")
    for name, (dtype, ndim) in SHAPES.items():
        found = tensors[name]
        if found.dtype != np.dtype(dtype) or found.ndim != ndim:
            raise TraceContentError(f"tensor {name} is {found.dtype} with {found.ndim} axes, not {dtype} with {ndim}")
    digest = seal_file(ours, tensors)
    if digest != stated:
        raise TraceContentError(f"its digest is {digest}, the file states {stated}")
    spec = _spec_from_json(ours["foreroute.spec"])
    tables = {name: tensor for name, tensor in tensors.items() if name not in SHAPES}
    codec = decoder(ours["foreroute.codec"], spec, tables)
    if set(codec.tables) != set(tables):
        raise TraceContentError(f"there are unknown tensors: {', '.join(sorted(set(tables) - set(codec.tables)))}")
    order = ours["foreroute.pick_order"]
    if order not in (("kept", "dropped") if codec.keeps_order else ("dropped",)):
        raise TraceContentError(f"pick order cannot be {order!r} with codec {ours['foreroute.codec']}")
    provenance = json.loads(ours["foreroute.provenance"])
    if not isinstance(provenance, dict):
        raise TraceContentError(f"provenance is {provenance!r}, not a table")
    index = TraceIndex(
        spec=spec,
        codec_name=ours["foreroute.codec"],
        codec=codec,
        pick_order_kept=order == "kept",
        provenance={str(key): str(value) for key, value in provenance.items()},
        runs=Runs(tensors["run_offsets"], tensors["run_starts"], tensors["run_lengths"]),
        **{name: tensors[name] for name in SHAPES if not name.startswith("run_")},
    )
    _check_rows(index, sizes)
    _check_payloads(index, sizes)
    check_expansion(index, 4 * sizes["token_ids"] + 8 * sizes["payloads"])
    return index


def _check_rows(index: TraceIndex, sizes: Mapping[str, int]) -> None:
    stored, blocks = sizes["token_ids"], index.block_starts
    if not _tiles(blocks[:-1], stored) or blocks[-1:].tolist() != [stored] or sizes["valid_bits"] != (stored + 7) // 8:
        raise TraceContentError(f"blocks or validity bits do not tile {stored} stored rows")
    if not _tiles(index.span_starts, stored) or len(index.span_starts) != len(index.span_versions):
        raise TraceContentError(f"weight-version spans do not tile {stored} stored rows")
    offsets, starts, lengths = index.runs.offsets, index.runs.starts, index.runs.lengths
    if not ascending(offsets, len(starts)) or len(starts) != len(lengths):
        raise TraceContentError("run_offsets do not go from 0 to the number of runs")
    inside = (starts >= 0) & (lengths >= 1) & (lengths <= stored) & (starts <= stored - lengths)
    if not inside.all():
        raise TraceContentError(f"a run leaves the {stored} stored rows")
    if as_offsets(lengths)[-1] > MAX_EXPANSION * stored:
        raise TraceContentError(f"the sequences have more than {MAX_EXPANSION} times the {stored} stored rows")


def check_expansion(index: TraceIndex, stored_bytes: int) -> None:
    """Raise `TraceContentError` when the routes of all sequences would take far more memory than they take on disk.

    Args:
        index: the head of the file.
        stored_bytes: of tokens and payloads.
    """
    spec = index.spec
    decoded = int(as_offsets(index.runs.lengths)[-1]) * spec.num_layers * spec.top_k * spec.id_dtype.itemsize
    if decoded > max(DECODED_FREELY, DECODED_PER_BYTE * stored_bytes):
        raise TraceContentError(f"{stored_bytes} bytes of tokens and routes would become {decoded} bytes of routes")


def _check_payloads(index: TraceIndex, sizes: Mapping[str, int]) -> None:
    shape = (len(index.block_starts) - 1, index.spec.num_layers)
    if index.payload_words.shape != shape or index.payload_seals.shape != (*shape, SEAL_BYTES):
        raise TraceContentError(f"payload tables have shape {index.payload_words.shape}, not blocks x layers {shape}")
    if index.row_seals.shape != (shape[0], SEAL_BYTES):
        raise TraceContentError(f"row_seals has shape {index.row_seals.shape} for {shape[0]} blocks")
    if int(index.payload_words.sum(dtype=np.uint64)) != sizes["payloads"]:
        raise TraceContentError(f"payload_words does not add up to the {sizes['payloads']} words there are")


def _tiles(starts: NDArray[np.int64], total: int) -> bool:
    """Whether the starts of non-empty intervals begin at 0, ascend and stay below `total`."""
    if total == 0 or len(starts) == 0:
        return total == len(starts) == 0
    return bool(starts[0] == 0 and starts[-1] < total and (starts[1:] > starts[:-1]).all())


def _spec_to_json(spec: RoutingSpec) -> str:
    return json.dumps(
        {
            "num_experts": spec.num_experts,
            "top_k": spec.top_k,
            "layers": [[layer.index, layer.kind.value] for layer in spec.layers],
            "model": spec.model,
        }
    )


def _spec_from_json(text: str) -> RoutingSpec:
    fields = json.loads(text)
    layers = tuple(RoutedLayer(int(index), LayerKind(kind)) for index, kind in fields["layers"])
    return RoutingSpec(int(fields["num_experts"]), int(fields["top_k"]), layers, str(fields["model"]))
