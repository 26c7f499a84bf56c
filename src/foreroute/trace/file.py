"""Traces on disk: one safetensors file, written atomically, checked on reading.

header      foreroute.version, foreroute.spec (JSON), foreroute.provenance (JSON), foreroute.digest
tensors     expert_ids [N, L, K] · valid_bits [ceil(N / 8)] · token_ids [N] · offsets [S + 1] ·
            span_starts [V] · span_versions [V]
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.errors import TraceContentError, TraceFileError
from foreroute.trace.check import check_rows
from foreroute.trace.container import RoutingTrace
from foreroute.trace.digest import digest
from foreroute.trace.spec import LayerKind, RoutedLayer, RoutingSpec

FORMAT_VERSION = 1


def save(trace: RoutingTrace, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write `trace` to `path`: the whole file or nothing.

    Raises:
        TraceFileError: when `path` exists and `overwrite` is False.
    """
    from safetensors.numpy import save_file

    target = Path(path)
    if target.exists() and not overwrite:
        raise TraceFileError(f"{target} already exists; pass another path, or overwrite=True to replace it")
    spans = trace.version_spans
    tensors: dict[str, NDArray[Any]] = {
        "expert_ids": np.ascontiguousarray(trace.expert_ids_NLK),
        "valid_bits": np.packbits(trace.valid_N),
        "token_ids": np.ascontiguousarray(trace.token_ids_N),
        "offsets": trace.offsets,
        "span_starts": np.array([start for start, _, _ in spans], np.int64),
        "span_versions": np.array([version for _, _, version in spans], np.int32),
    }
    header = {
        "foreroute.version": str(FORMAT_VERSION),
        "foreroute.spec": _spec_to_json(trace.spec),
        "foreroute.provenance": json.dumps(dict(trace.provenance)),
        "foreroute.digest": digest(trace),
    }
    write_atomically(target, lambda temporary: save_file(tensors, temporary, metadata=header))
    return target


def load(path: str | os.PathLike[str]) -> RoutingTrace:
    """Read a trace and verify its digest.

    Raises:
        TraceFileError: when the file is missing, not a trace, of a newer format, truncated or damaged.
    """
    source = Path(path)
    header, tensors = _read(source)
    version = header.get("foreroute.version")
    if version is None:
        raise TraceFileError(f"{source} is a safetensors file but not a routing trace (no foreroute.version in it)")
    if version != str(FORMAT_VERSION):
        raise TraceFileError(
            f"{source} has trace format {version}; this foreroute reads format {FORMAT_VERSION}. Upgrade foreroute"
        )
    try:
        trace = _assemble(header, tensors)
        check_rows(trace.expert_ids_NLK, trace.valid_N, trace.offsets, trace.spec)
    except (KeyError, TypeError, ValueError) as error:  # json and content errors are ValueErrors
        raise TraceFileError(f"{source} is damaged: {error}. Record or copy it again") from error
    stated, found = header.get("foreroute.digest"), digest(trace)
    if stated != found:
        raise TraceFileError(f"{source} is damaged: its digest is {found}, the file states {stated}. Copy it again")
    return trace


def write_atomically(target: Path, write: Callable[[str], None]) -> None:
    """Let `write` fill a temporary file beside `target`, flush it to disk, then move it into place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    try:
        write(temporary)
        os.chmod(temporary, 0o666 & ~_umask())
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """The permissions that new files lack; mkstemp ignores them and lets nobody else read."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _read(source: Path) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    from safetensors import SafetensorError, safe_open

    if not source.is_file():
        raise TraceFileError(f"{source} does not exist or is not a file")
    try:
        with safe_open(source, framework="np") as opened:
            return opened.metadata() or {}, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, TypeError) as error:  # TypeError: a dtype that numpy lacks
        raise TraceFileError(
            f"{source} is not a readable trace ({error}). It may be truncated; copy it again"
        ) from error


def _assemble(header: dict[str, str], tensors: dict[str, NDArray[Any]]) -> RoutingTrace:
    spec = _spec_from_json(header["foreroute.spec"])
    offsets = _expect(tensors, "offsets", np.int64, 1)
    if len(offsets) < 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise TraceContentError("offsets do not start at 0 and ascend")
    rows = int(offsets[-1])
    ids = _expect(tensors, "expert_ids", spec.id_dtype, 3)
    if ids.shape != (rows, spec.num_layers, spec.top_k):
        raise TraceContentError(f"expert_ids has shape {ids.shape}, the header says {rows} rows of {spec}")
    token_ids = _expect(tensors, "token_ids", np.int32, 1)
    bits = _expect(tensors, "valid_bits", np.uint8, 1)
    if len(token_ids) != rows or len(bits) != (rows + 7) // 8:
        raise TraceContentError(f"{len(token_ids)} tokens and {len(bits)} validity bytes for {rows} rows")
    provenance = json.loads(header["foreroute.provenance"])
    if not isinstance(provenance, dict):
        raise TraceContentError(f"provenance is {provenance!r}, not a table")
    return RoutingTrace(
        spec=spec,
        expert_ids_NLK=ids,
        valid_N=np.unpackbits(bits, count=rows).astype(np.bool_),
        token_ids_N=token_ids,
        weight_versions_N=_versions(tensors, rows),
        offsets=offsets,
        provenance={str(key): str(value) for key, value in provenance.items()},
    )


def _versions(tensors: dict[str, NDArray[Any]], rows: int) -> NDArray[np.int32]:
    starts = _expect(tensors, "span_starts", np.int64, 1)
    versions = _expect(tensors, "span_versions", np.int32, 1)
    stops = np.r_[starts[1:], rows]
    if len(starts) != len(versions) or (rows > 0) != (len(starts) > 0) or (stops <= starts).any():
        raise TraceContentError("weight-version spans do not tile the rows")
    if len(starts) and starts[0] != 0:
        raise TraceContentError("the first weight-version span does not start at row 0")
    return np.repeat(versions, stops - starts)


def _expect(tensors: dict[str, NDArray[Any]], name: str, dtype: Any, ndim: int) -> NDArray[Any]:
    if name not in tensors:
        raise TraceContentError(f"tensor {name} is missing")
    tensor = tensors[name]
    if tensor.dtype != dtype or tensor.ndim != ndim:
        raise TraceContentError(
            f"tensor {name} is {tensor.dtype} with {tensor.ndim} axes, expected {dtype} with {ndim}"
        )
    return tensor


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
