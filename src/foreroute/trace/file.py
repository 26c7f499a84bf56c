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

import numpy as np
from numpy.typing import ArrayLike

from foreroute.errors import TraceContentError, TraceFileError
from foreroute.files import TensorFile, write_atomically, writing_named
from foreroute.trace.check import as_sequence_numbers
from foreroute.trace.codec import CodecName
from foreroute.trace.container import RoutingTrace
from foreroute.trace.index import MOST_HEADER_BYTES, read_index
from foreroute.trace.reading import read_rows
from foreroute.trace.spec import RoutedLayer
from foreroute.trace.writing import encode_trace


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
        TraceFileError: when `path` exists and `overwrite` is False, or cannot be written: what was there is whole.
        TraceContentError: when a row cannot be true, the codec is unknown, there are gate weights, or the model's name
            and the provenance take more than 1 MiB.
    """
    from safetensors.numpy import save as to_bytes

    target = Path(path)
    with writing_named(target, TraceFileError):
        if target.exists() and not overwrite:
            raise TraceFileError(f"{target} already exists; pass another path, or overwrite=True to replace it")
        metadata, tensors = encode_trace(trace, codec)
        raw = to_bytes(tensors, metadata=metadata)
        if (header := int.from_bytes(raw[:8], "little")) > MOST_HEADER_BYTES:
            raise TraceContentError(
                f"the header would take {header} bytes, expected {MOST_HEADER_BYTES} at most; shorten the provenance"
            )
        # Written here and not by safetensors, whose own temporary file hides the modes and names of ours.
        write_atomically(target, raw, overwrite=overwrite)
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
        TraceContentError: when a sequence is not in the file or is no number, or no layer is asked for.
        SpecMismatchError: when a layer is not in the file.
    """
    source = Path(path)
    with TensorFile(source, TraceFileError, most_header_bytes=MOST_HEADER_BYTES) as file:
        with _damage_named(source):
            index = read_index(file)
        count = len(index.runs.offsets) - 1
        chosen_S = np.arange(count) if sequences is None else as_sequence_numbers(sequences, count)
        chosen_L = list(index.spec.layers if layers is None else layers)
        positions = index.spec.positions(chosen_L)
        spec = replace(index.spec, layers=tuple(chosen_L))
        with _damage_named(source):
            return read_rows(file, index, spec, chosen_S, positions)


def encoded_size(trace: RoutingTrace, codec: CodecName) -> int:
    """Bytes that a file of `trace` would hold in a codec, its header left out."""
    _, tensors = encode_trace(trace, codec)
    return sum(tensor.nbytes for tensor in tensors.values())


@contextmanager
def _damage_named(source: Path) -> Iterator[None]:
    try:
        yield
    except TraceContentError as error:
        raise TraceFileError(f"{source} is damaged: {error}. Record or copy it again") from error
