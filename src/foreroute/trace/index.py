"""The head of a trace file: everything but tokens and payloads, written to and checked from safetensors.

`docs/trace-format.md` says what each field means and what a reader must refuse. Not the reading of rows: `trace.file`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import TraceContentError, TraceFileError
from foreroute.files import TensorFile, parse_json
from foreroute.trace.check import as_offsets, ascending
from foreroute.trace.codec import Codec, decoder
from foreroute.trace.seal import SEAL_BYTES, seal_file
from foreroute.trace.sharing import MAX_EXPANSION, Runs
from foreroute.trace.spec import MAX_LAYERS, LayerKind, RoutedLayer, RoutingSpec

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
BULK = {"token_ids": "<i4", "valid_bits": "|u1", "payloads": "<u8"}
TABLES = {"code_lengths": ("|u1", 2)}
"""What only some codecs have."""
MOST_HEADER_BYTES = 1 << 20
"""Of the safetensors header: a parsed one takes far more memory than its bytes."""
DECODED_FREELY = 16 << 20
DECODED_PER_BYTE = 1024
"""A file may ask for 16 MiB of routes, or for 1,024 times the bytes of its tokens and payloads."""

KINDS = tuple(kind.value for kind in LayerKind)
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


def read_index(file: TensorFile) -> TraceIndex:
    """Check and unpack what `write_index` made.

    Raises:
        TraceFileError: when it is no trace, or one of another format.
        TraceContentError: when it cannot be right.
    """
    _check_version(file)
    ours = {key: value for key, value in file.metadata.items() if key.startswith(KEY)}
    _check_names(ours, file)
    tensors = {name: file.read(name) for name in (*SHAPES, *TABLES) if name in file.names}
    sizes = {name: file.shape(name)[0] for name in BULK}
    stated = ours.pop("foreroute.digest")
    digest = seal_file(ours, tensors)
    if digest != stated:
        raise TraceContentError(f"its digest is {digest}, the file states {stated:.40}")
    spec = _spec_from_json(ours["foreroute.spec"])
    tables = {name: tensors[name] for name in TABLES if name in tensors}
    codec = decoder(ours["foreroute.codec"], spec, tables)
    if set(codec.tables) != set(tables):
        raise TraceContentError(f"codec {ours['foreroute.codec']} has no {', '.join(set(tables) - set(codec.tables))}")
    order = ours["foreroute.pick_order"]
    if order not in (("kept", "dropped") if codec.keeps_order else ("dropped",)):
        raise TraceContentError(f"pick order cannot be {order!r:.40} with codec {ours['foreroute.codec']}")
    index = TraceIndex(
        spec=spec,
        codec_name=ours["foreroute.codec"],
        codec=codec,
        pick_order_kept=order == "kept",
        provenance=_provenance_from_json(ours["foreroute.provenance"]),
        runs=Runs(tensors["run_offsets"], tensors["run_starts"], tensors["run_lengths"]),
        **{name: tensors[name] for name in SHAPES if not name.startswith("run_")},
    )
    _check_rows(index, sizes)
    _check_last_bits(file, sizes)
    _check_payloads(index, sizes)
    check_expansion(index, 4 * sizes["token_ids"] + 8 * sizes["payloads"])
    return index


def check_facts(spec: RoutingSpec, provenance: Mapping[str, str]) -> None:
    """Raise `TraceContentError` when a model's name or provenance is no text that a file can hold."""
    if not _is_text(spec.model):
        raise TraceContentError(f"the model's name is {spec.model!r:.80}; expected text")
    for key, value in provenance.items():
        if not (_is_text(key) and _is_text(value)):
            raise TraceContentError(f"provenance has {key!r:.40} = {value!r:.80}; expected texts")


def _check_version(file: TensorFile) -> None:
    version = file.metadata.get("foreroute.version")
    if version is None:
        raise TraceFileError(f"{file.path} is a safetensors file but not a routing trace (no foreroute.version in it)")
    if version != str(FORMAT_VERSION):
        raise TraceFileError(
            f"{file.path} has trace format {version:.40}; this foreroute reads format {FORMAT_VERSION}. "
            "Upgrade foreroute"
        )


def _check_names(ours: Mapping[str, str], file: TensorFile) -> None:
    """Every key and tensor that must be there is, with its type, and no other; nothing is read yet."""
    there = {*ours, *file.names}
    if not all(_is_text(value) for value in ours.values()):
        raise TraceContentError("its metadata hold halves of characters")
    missing = [name for name in (*METADATA, *SHAPES, *BULK) if name not in there]
    unknown = (set(ours) - set(METADATA)) | (set(file.names) - {*SHAPES, *TABLES, *BULK})
    if missing or unknown:
        raise TraceContentError(f"missing: {_few(missing)}; unknown: {_few(sorted(unknown))}")
    for name, (dtype, ndim) in {**SHAPES, **TABLES, **{name: (dtype, 1) for name, dtype in BULK.items()}}.items():
        if name in there and (file.dtype(name) != np.dtype(dtype) or len(file.shape(name)) != ndim):
            raise TraceContentError(
                f"tensor {name} is {file.dtype(name)} of shape {file.shape(name)}, expected {np.dtype(dtype)} with "
                f"{ndim} axes"
            )


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(f"{name:.40}" for name in listed[:8]) + (", ..." if len(listed) > 8 else "") or "nothing"


def _check_last_bits(file: TensorFile, sizes: Mapping[str, int]) -> None:
    used, last = sizes["token_ids"] % 8, sizes["valid_bits"]
    if used and int(file.read("valid_bits", last - 1, last)[0]) >> used:
        raise TraceContentError(f"valid_bits has bits past the {sizes['token_ids']} stored rows")


def _check_rows(index: TraceIndex, sizes: Mapping[str, int]) -> None:
    stored, blocks = sizes["token_ids"], index.block_starts
    if not _tiles(blocks[:-1], stored) or blocks[-1:].tolist() != [stored] or sizes["valid_bits"] != (stored + 7) // 8:
        raise TraceContentError(f"blocks or validity bits do not tile {stored} stored rows")
    if not _tiles(index.span_starts, stored) or len(index.span_starts) != len(index.span_versions):
        raise TraceContentError(f"weight-version spans do not tile {stored} stored rows")
    if index.span_versions.min(initial=0) < -1:
        raise TraceContentError(f"a weight version is {index.span_versions.min()}; expected 0 or more, or -1")
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
            "num_experts": int(spec.num_experts),
            "top_k": int(spec.top_k),
            "layers": [[int(layer.index), layer.kind.value] for layer in spec.layers],
            "model": spec.model,
        }
    )


def _spec_from_json(text: str) -> RoutingSpec:
    fields = parse_json(text, TraceContentError, name="foreroute.spec")
    if not isinstance(fields, dict) or set(fields) != {"num_experts", "top_k", "layers", "model"}:
        raise TraceContentError(f"foreroute.spec is {fields!r:.80}; expected num_experts, top_k, layers and model")
    layers = fields["layers"]
    # counted before anything is made of them
    if not isinstance(layers, list) or len(layers) > MAX_LAYERS:
        raise TraceContentError(f"the layer table is {layers!r:.40}; expected a list of {MAX_LAYERS} layers at most")
    if not _is_text(fields["model"]):
        raise TraceContentError(f"the model's name is {fields['model']!r:.40}; expected text")
    return RoutingSpec(fields["num_experts"], fields["top_k"], tuple(map(_layer_from_json, layers)), fields["model"])


def _layer_from_json(entry: Any) -> RoutedLayer:
    if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str) and entry[1] in KINDS):
        raise TraceContentError(f"a layer is {entry!r:.60}; expected [number, kind] with one of {', '.join(KINDS)}")
    return RoutedLayer(entry[0], LayerKind(entry[1]))


def _provenance_from_json(text: str) -> dict[str, str]:
    facts = parse_json(text, TraceContentError, name="foreroute.provenance")
    if not isinstance(facts, dict) or not all(_is_text(part) for fact in facts.items() for part in fact):
        raise TraceContentError(f"provenance is {facts!r:.80}; expected a table of texts")
    return facts


def _is_text(value: object) -> bool:
    """Whether it is a string that can be written as UTF-8: JSON can name halves of characters, which cannot."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
