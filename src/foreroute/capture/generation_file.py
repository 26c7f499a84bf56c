"""A generation on disk: a trace file, and beside it the log-probs of its response tokens.

    rollout.safetensors          log-probs [R] float32, prompt lengths [S] int64; where text of tools stands between
                                 turns, sampled [N] uint8, 1 for tokens of responses. Metadata: foreroute.generation =
                                 "1", foreroute.trace = the name of the trace file, foreroute.trace_digest = the digest
                                 of the trace, foreroute.digest = that of the rest, as in a trace file
    rollout.safetensors-0123456789abcdef.trace.safetensors
                                 the trace, as `foreroute.save` writes it

The name of the trace file holds the first half of the trace's digest, so that a new trace never takes the place of the
one that an older generation needs. The trace is looked for in the same folder only; its name holds no path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.generation import Generation
from foreroute.errors import TraceFileError
from foreroute.files import TensorFile, write_atomically, writing_named
from foreroute.trace import digest, load, save
from foreroute.trace.seal import seal_file

GENERATION_VERSION = "1"
MOST_HEADER_BYTES = 1 << 20
METADATA = tuple("foreroute." + name for name in ("generation", "trace", "trace_digest", "digest"))
TENSORS = {"logprobs": np.dtype("<f4"), "prompt_lengths": np.dtype("<i8"), "sampled": np.dtype("|u1")}


def save_generation(generation: Generation, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write `path` and, beside it, the trace: the trace first, so that a generation never lacks its trace.

    Whenever this is killed, the generation that was there before is whole, or the new one is.

    Raises:
        TraceFileError: when `path` exists and `overwrite` is False, or a file cannot be written.
        TraceContentError: as `foreroute.save`.
    """
    from safetensors.numpy import save as to_bytes

    target = Path(path)
    with writing_named(target, TraceFileError):
        if target.exists() and not overwrite:
            raise TraceFileError(f"{target} already exists; pass another path, or overwrite=True to replace it")
        before = _named_trace(target)
        of_trace = digest(generation.trace)
        name = f"{target.name}-{of_trace[:16]}.trace.safetensors"
        save(generation.trace, target.with_name(name), overwrite=True)
        tensors: dict[str, NDArray[Any]] = {
            "logprobs": np.ascontiguousarray(generation.logprobs_R, np.float32),
            "prompt_lengths": np.ascontiguousarray(generation.prompt_lengths, np.int64),
        }
        if int(generation.sampled_N.sum()) < int((generation.trace.lengths - generation.prompt_lengths).sum()):
            tensors["sampled"] = generation.sampled_N.astype(np.uint8)
        header = {
            "foreroute.generation": GENERATION_VERSION,
            "foreroute.trace": name,
            "foreroute.trace_digest": of_trace,
        }
        header["foreroute.digest"] = seal_file(header, tensors)
        write_atomically(target, to_bytes(tensors, metadata=header), overwrite=overwrite)
    if before not in (None, name):
        with suppress(OSError):
            target.with_name(str(before)).unlink()
    return target


def load_generation(path: str | os.PathLike[str]) -> Generation:
    """Read a generation and its trace.

    Raises:
        TraceFileError: when a file is missing, damaged or no generation, or the trace is another one.
        TraceContentError: when log-probs and sequences do not fit together.
    """
    source = Path(path)
    header, tensors = _read(source)
    name = header["foreroute.trace"]
    if not name or Path(name).name != name:
        raise TraceFileError(f"{source} names the trace {name!r:.80}; expected the name of a file in the same folder")
    trace = load(source.with_name(name))
    if digest(trace) != header["foreroute.trace_digest"]:
        raise TraceFileError(f"{source.with_name(name)} is not the trace that {source} was written with; copy both")
    sampled = tensors.get("sampled")
    if sampled is not None and sampled.max(initial=0) > 1:
        raise TraceFileError(f"{source} has sampled tokens that are neither 0 nor 1; it is damaged")
    if sampled is None:
        return Generation(trace, tensors["prompt_lengths"], tensors["logprobs"])
    return Generation(trace, tensors["prompt_lengths"], tensors["logprobs"], sampled.astype(np.bool_))


def _read(source: Path) -> tuple[Mapping[str, str], dict[str, NDArray[Any]]]:
    """Metadata and tensors, whose digest is right."""
    with TensorFile(source, TraceFileError, most_header_bytes=MOST_HEADER_BYTES) as file:
        version = file.metadata.get("foreroute.generation")
        if version != GENERATION_VERSION:
            raise TraceFileError(
                f"{source} is not a generation (foreroute.generation = {version!r:.40}, expected "
                f"{GENERATION_VERSION!r}). A trace file alone goes with --trace; capture.save_generation writes "
                "generations"
            )
        ours = {key: value for key, value in file.metadata.items() if key.startswith("foreroute.")}
        if set(ours) != set(METADATA) or not all(value.isprintable() for value in ours.values()):
            raise TraceFileError(f"{source} has other metadata than {', '.join(METADATA)}; it is damaged")
        if not {"logprobs", "prompt_lengths"} <= set(file.names) <= set(TENSORS):
            raise TraceFileError(f"{source} has other tensors than {', '.join(TENSORS)}; it is damaged")
        for name in file.names:
            if file.dtype(name) != TENSORS[name] or len(file.shape(name)) != 1:
                raise TraceFileError(
                    f"{source}: {name} is {file.dtype(name)} {list(file.shape(name))}, expected {TENSORS[name]} with "
                    "one axis; it is damaged"
                )
        tensors = {name: file.read(name) for name in file.names}
    stated = ours.pop("foreroute.digest")
    if seal_file(ours, tensors) != stated:
        raise TraceFileError(f"{source} is damaged: its digest is not the one that it states. Copy it again")
    return ours, tensors


def _named_trace(target: Path) -> str | None:
    """The trace file that a generation at `target` names, if there is one and the name is one that we gave it."""
    with suppress(TraceFileError):
        name = _read(target)[0]["foreroute.trace"]
        if re.fullmatch(re.escape(target.name) + r"-[0-9a-f]{16}\.trace\.safetensors", name):
            return name
    return None
