"""Traces on disk: one safetensors file, written atomically, read whole or in part, checked on reading.

`docs/trace-format.md` is the format. Here are the doors and what can go wrong at them; `trace.writing` and
`trace.reading` turn a trace into tensors and back, `trace.index` is the head of the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreroute.errors import TraceContentError, TraceFileError
from foreroute.files import write_atomically
from foreroute.trace.codec import CodecName
from foreroute.trace.container import RoutingTrace
from foreroute.trace.index import BULK, FORMAT_VERSION, TraceIndex, read_index
from foreroute.trace.reading import read_rows
from foreroute.trace.spec import RoutedLayer
from foreroute.trace.writing import encode_trace

MALFORMED = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""What unpacking an untrusted head raises; json and content errors are ValueErrors."""


def save(
    trace: RoutingTrace, path: str | os.PathLike[str], *, codec: CodecName = "packed", overwrite: bool = False
) -> Path:
    """Write `trace` to `path`: the whole file or nothing. Prompts that samples share are stored once.

    Args:
        trace: what to write.
        path: where to.
        codec: "packed" keeps pick order in ceil(log2 E) bits per pick; "raw" in whole bytes; "planes" drops the order
            (ids come back ascending) and is the densest.
        overwrite: whether an existing file may be replaced.

    Raises:
        TraceFileError: when `path` exists and `overwrite` is False.
        TraceContentError: when a row cannot be true, the codec is unknown, or there are gate weights.
    """
    from safetensors.numpy import save as to_bytes

    target = Path(path)
    if target.exists() and not overwrite:
        raise TraceFileError(f"{target} already exists; pass another path, or overwrite=True to replace it")
    metadata, tensors = encode_trace(trace, codec)
    raw = to_bytes(tensors, metadata=metadata)
    try:
        # Written here and not by safetensors, whose own temporary file hides the modes and names of ours.
        write_atomically(target, raw, overwrite=overwrite)
    except FileExistsError as error:
        raise TraceFileError(f"{target} was written by another process meanwhile; nothing was replaced") from error
    return target


def load(
    path: str | os.PathLike[str],
    *,
    sequences: ArrayLike | None = None,
    layers: Iterable[RoutedLayer] | None = None,
) -> RoutingTrace:
    """Read a trace, or the sequences and layers that a rank needs, and verify every byte that is used.

    Reading a part gives what `load(path).select(sequences).select_layers(layers)` gives, and decodes only the blocks
    that hold those sequences, in those layers alone.

    Args:
        path: a file written by `save`.
        sequences: integers [S'], each from 0 to S - 1; all in order when left out.
        layers: members of the file's layer table; all in order when left out.

    Raises:
        TraceFileError: when the file is missing, not a trace, of a newer format, truncated or damaged.
        TraceContentError: when a sequence is not in the file, or no layer is asked for.
        SpecMismatchError: when a layer is not in the file.
    """
    source = Path(path)
    with _opened(source) as file:
        with _damage_named(source, *MALFORMED):
            index = _read_index(file, source)
        chosen_S = _chosen_sequences(index, sequences)
        chosen_L = list(index.spec.layers if layers is None else layers)
        positions = index.spec.positions(chosen_L)
        spec = replace(index.spec, layers=tuple(chosen_L))
        with _damage_named(source, TraceContentError):
            return read_rows(file, index, spec, chosen_S, positions)


def encoded_size(trace: RoutingTrace, codec: CodecName) -> int:
    """Bytes that a file of `trace` would hold in a codec, its header left out."""
    _, tensors = encode_trace(trace, codec)
    return sum(tensor.nbytes for tensor in tensors.values())


@contextmanager
def _opened(source: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    if not source.is_file():
        raise TraceFileError(f"{source} does not exist or is not a file")
    try:
        file = safe_open(source, framework="np")
    except (SafetensorError, OSError) as error:
        raise TraceFileError(
            f"{source} is not a readable trace ({error}). It may be truncated; copy it again"
        ) from error
    with file as opened:
        yield opened


@contextmanager
def _damage_named(source: Path, *kinds: type[Exception]) -> Iterator[None]:
    from safetensors import SafetensorError

    refused: tuple[type[Exception], ...] = (*kinds, SafetensorError)
    try:
        yield
    except TraceFileError:
        raise
    except refused as error:
        raise TraceFileError(f"{source} is damaged: {error}. Record or copy it again") from error


def _read_index(file: Any, source: Path) -> TraceIndex:
    metadata: dict[str, str] = file.metadata() or {}
    version = metadata.get("foreroute.version")
    if version is None:
        raise TraceFileError(f"{source} is a safetensors file but not a routing trace (no foreroute.version in it)")
    if version != str(FORMAT_VERSION):
        raise TraceFileError(
            f"{source} has trace format {version}; this foreroute reads format {FORMAT_VERSION}. Upgrade foreroute"
        )
    tensors: dict[str, NDArray[Any]] = {}
    sizes: dict[str, int] = {}
    for name in file.keys():  # noqa: SIM118
        if name in BULK:
            sizes[name] = _bulk_size(file.get_slice(name), name)
        else:
            tensors[name] = file.get_tensor(name)
    return read_index(metadata, tensors, sizes)


def _bulk_size(view: Any, name: str) -> int:
    shape = view.get_shape()
    if view.get_dtype() != BULK[name] or len(shape) != 1:
        raise TraceContentError(f"tensor {name} is {view.get_dtype()} {shape}, expected {BULK[name]} with one axis")
    return int(shape[0])


def _chosen_sequences(index: TraceIndex, sequences: ArrayLike | None) -> NDArray[np.int64]:
    count = len(index.runs.offsets) - 1
    if sequences is None:
        return np.arange(count)
    chosen = np.asarray(sequences, dtype=np.int64).reshape(-1)
    if chosen.size and (chosen.min() < 0 or chosen.max() >= count):
        raise TraceContentError(
            f"sequences {int(chosen.min())} to {int(chosen.max())} were asked of a file of {count} sequences"
        )
    return chosen
