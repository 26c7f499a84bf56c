"""A generation on disk: a trace file, and beside it the log-probs of its response tokens.

    rollout.safetensors          log-probs [R] float32, prompt lengths [S] int64; metadata: foreroute.generation = "1",
                                 foreroute.trace = the name of the trace file, foreroute.digest = its digest.
                                 Where text of tools stands between turns: sampled [N] uint8, 1 for tokens of responses
    rollout.trace.safetensors    the trace, as `foreroute.save` writes it

The digest binds the two. The trace is looked for in the same folder only; its name holds no path.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.capture.generation import Generation
from foreroute.errors import TraceFileError
from foreroute.files import TensorFile, write_atomically
from foreroute.trace import digest, load, save

GENERATION_VERSION = "1"


def save_generation(generation: Generation, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write `path` and, beside it, the trace: the trace first, so that a generation never lacks its trace.

    Raises:
        TraceFileError: when one of the two exists and `overwrite` is False.
    """
    from safetensors.numpy import save as to_bytes

    target = Path(path)
    if target.exists() and not overwrite:
        raise TraceFileError(f"{target} already exists; pass another path, or overwrite=True to replace it")
    trace = save(generation.trace, target.with_name(f"{target.stem}.trace.safetensors"), overwrite=overwrite)
    tensors: dict[str, NDArray[Any]] = {
        "logprobs": np.ascontiguousarray(generation.logprobs_R, np.float32),
        "prompt_lengths": np.ascontiguousarray(generation.prompt_lengths, np.int64),
    }
    if int(generation.sampled_N.sum()) < int((generation.trace.lengths - generation.prompt_lengths).sum()):
        tensors["sampled"] = generation.sampled_N.astype(np.uint8)
    header = {
        "foreroute.generation": GENERATION_VERSION,
        "foreroute.trace": trace.name,
        "foreroute.digest": digest(generation.trace),
    }
    write_atomically(target, to_bytes(tensors, metadata=header))
    return target


def load_generation(path: str | os.PathLike[str]) -> Generation:
    """Read a generation and its trace.

    Raises:
        TraceFileError: when a file is missing, damaged or no generation, or the trace is another one.
        TraceContentError: when log-probs and sequences do not fit together.
    """
    source = Path(path)
    header, tensors = _read(source)
    if header.get("foreroute.generation") != GENERATION_VERSION:
        raise TraceFileError(
            f"{source} is not a generation (foreroute.generation = {header.get('foreroute.generation')!r}, expected "
            f"{GENERATION_VERSION!r}). A trace file alone goes with --trace; capture.save_generation writes generations"
        )
    name = header.get("foreroute.trace", "")
    if not name or Path(name).name != name:
        raise TraceFileError(f"{source} names the trace {name!r}; expected the name of a file in the same folder")
    trace = load(source.with_name(name))
    if digest(trace) != header.get("foreroute.digest"):
        raise TraceFileError(f"{source.with_name(name)} is not the trace that {source} was written with; copy both")
    for tensor, kind in (("logprobs", "f"), ("prompt_lengths", "i")):
        if tensor not in tensors or tensors[tensor].ndim != 1 or tensors[tensor].dtype.kind != kind:
            raise TraceFileError(f"{source} has no {tensor} of one axis and kind {kind!r}; it is damaged")
    sampled = tensors.get("sampled")
    if sampled is not None and (sampled.dtype != np.uint8 or (sampled > 1).any()):
        raise TraceFileError(f"{source} has sampled tokens that are neither 0 nor 1; it is damaged")
    prompt_lengths, logprobs_R = tensors["prompt_lengths"].astype(np.int64), tensors["logprobs"].astype(np.float32)
    if sampled is None:
        return Generation(trace, prompt_lengths, logprobs_R)
    return Generation(trace, prompt_lengths, logprobs_R, sampled.astype(np.bool_))


def _read(source: Path) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    with TensorFile(source, TraceFileError) as file:
        return file.metadata, {name: file.read(name) for name in file.names}
