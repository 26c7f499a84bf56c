"""Size and speed of trace files, per codec, beside what frameworks send and what general compressors reach.

Routes are synthetic (128 experts, top-8, 48 layers, sequences of 1,000 tokens), correlated and uncorrelated along the
sequence; those of recorded demo runs are measured too where `runs/demo` has some. Speeds are megabytes of uint8 ids per
second of processor time of one thread, medians of interleaved rounds.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.files import seal_slices
from foreroute.trace import CODECS, RoutedLayer, RoutingSpec, RoutingTrace, concatenate, load, save, synthetic_trace
from foreroute.trace.file.codec import CODEC_CLASSES, Codec, CodecName

NUM_EXPERTS, TOP_K, NUM_LAYERS, LENGTH = 128, 8, 48, 1000
ROWS_PER_CALL = 2000
MADE_LAYERS = 8
RECORDED = Path("runs/demo")


def run(quick: bool) -> dict[str, Any]:
    """Sizes of correlated, uncorrelated and recorded routes; speeds on the correlated ones."""
    sequences, copies, rounds = (48, 8, 5) if quick else (128, 8, 11)
    metrics: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, correlation in (("uncorrelated", 0.0), ("correlated", 0.7)):
            trace = made_trace(sequences, correlation)
            metrics[name] = sizes(trace, Path(folder))
        recorded = recorded_trace()
        if recorded is not None:
            metrics["recorded"] = sizes(recorded, Path(folder))
        large = concatenate([relabelled(trace, seed) for seed in range(copies)])
        measured, baselines = speeds(large, Path(folder), rounds)
    return {"metrics": {**metrics, **measured}, "baselines": baselines}


def made_trace(sequences: int, correlation: float) -> RoutingTrace:
    """48 layers of routes, of which 8 are drawn and the others are those with their experts renamed."""
    spec = RoutingSpec(NUM_EXPERTS, TOP_K, tuple(RoutedLayer(i) for i in range(MADE_LAYERS)), model="synthetic")
    few = synthetic_trace(spec, [LENGTH] * sequences, seed=1, correlation=correlation)
    ids = [relabelled(few, 100 + i).expert_ids_NLK for i in range(NUM_LAYERS // MADE_LAYERS)]
    layers = tuple(RoutedLayer(i) for i in range(NUM_LAYERS))
    return replace(few, spec=replace(spec, layers=layers), expert_ids_NLK=np.concatenate(ids, axis=1))


def relabelled(trace: RoutingTrace, seed: int) -> RoutingTrace:
    """Other tokens and other names of experts: the same statistics, and nothing that could be shared."""
    rng = np.random.default_rng(seed)
    names = np.stack([rng.permutation(trace.spec.num_experts) for _ in range(trace.spec.num_layers)])
    ids = names.astype(trace.spec.id_dtype)[np.arange(trace.spec.num_layers)[:, None], trace.expert_ids_NLK]
    ids[~trace.valid_N] = 0
    return replace(trace, expert_ids_NLK=ids, token_ids_N=rng.permutation(trace.token_ids_N))


def recorded_trace() -> RoutingTrace | None:
    """The traces of recorded demo runs that belong to one model, joined."""
    traces = [load(path) for path in sorted(RECORDED.glob("**/traces/*.safetensors"))]
    same = [t for t in traces if t.spec == traces[0].spec]
    return concatenate(same) if same else None


def sizes(trace: RoutingTrace, folder: Path) -> dict[str, float]:
    """Bytes per routed token and layer; files count in whole, with tokens, tables and seals."""
    import zstandard

    spec, ids = trace.spec, trace.expert_ids_NLK[trace.valid_N]
    cells = ids.shape[0] * spec.num_layers
    written = {c: save(trace, folder / "sized", codec=c, overwrite=True).stat().st_size / cells for c in CODECS}
    compressed = len(zstandard.ZstdCompressor(level=3).compress(np.ascontiguousarray(ids).data))
    return {
        **{f"{codec}_bytes": round(size, 3) for codec, size in written.items()},
        "int32_base64_bytes": round(spec.top_k * 4 * 4 / 3, 3),
        "uint8_bytes": float(spec.top_k * spec.id_dtype.itemsize),
        "zstd_uint8_bytes": round(compressed / cells, 3),
        "zstd_bit_planes_bytes": round(_bit_planes_bytes(trace), 3),
        "any_set_bound_bytes": round(math.log2(math.comb(spec.num_experts, spec.top_k)) / 8, 3),
        "cells": float(cells),
    }


def speeds(trace: RoutingTrace, folder: Path, rounds: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Throughput of codecs and files, cost of the seals, and a rank's share of 8 x 8."""
    import zstandard

    ids = np.ascontiguousarray(trace.expert_ids_NLK)
    plain = ids[: len(ids) // 4].tobytes()
    frame = zstandard.ZstdCompressor(level=3).compress(plain)
    jobs = {f"{name} {verb}": job for name in CODECS for verb, job in _jobs(trace, ids, name, folder).items()}
    jobs["zstd encode"] = _timed(lambda: zstandard.ZstdCompressor(level=3).compress(plain))
    jobs["zstd decode"] = _timed(lambda: zstandard.ZstdDecompressor().decompress(frame))
    seconds = _medians(jobs, rounds)
    return _as_metrics(seconds, ids.nbytes), {
        "zstd_uint8_encode_mbs": round(len(plain) / seconds["zstd encode"] / 1e6),
        "zstd_uint8_decode_mbs": round(len(plain) / seconds["zstd decode"] / 1e6),
    }


Job = Callable[[], tuple[float, ...]]
"""Does its work and says how many seconds of processor time its parts took."""


def _jobs(trace: RoutingTrace, ids: NDArray[Any], name: CodecName, folder: Path) -> dict[str, Job]:
    rows = np.flatnonzero(trace.valid_N)
    blocks = [rows[a : a + ROWS_PER_CALL] for a in range(0, len(rows), ROWS_PER_CALL)]
    codec = CODEC_CLASSES[name].fitted(trace.spec, ids, blocks)
    written = [codec.encode(ids, block) for block in blocks]
    out = np.zeros_like(ids)
    path = folder / f"{name}.safetensors"
    part, layers = np.arange(len(trace) // 8) + len(trace) // 8, trace.spec.layers[6:12]
    return {
        "encode": _timed(lambda: [codec.encode(ids, block) for block in blocks]),
        "decode": lambda: _decode(codec, written, blocks, out),
        "save": _timed(lambda: save(trace, path, codec=name, overwrite=True)),
        "load": _timed(lambda: load(path)),
        "part": _timed(lambda: load(path, sequences=part, layers=layers)),
    }


def _timed(work: Callable[[], object]) -> Job:
    def job() -> tuple[float, ...]:
        start = time.thread_time()
        work()
        return (time.thread_time() - start,)

    return job


def _decode(
    codec: Codec,
    written: list[tuple[NDArray[np.uint64], NDArray[np.int64]]],
    blocks: list[NDArray[np.int64]],
    out: NDArray[Any],
) -> tuple[float, ...]:
    """Seconds of decoding and of verifying seals, each block having just been copied, as from a file."""
    columns, decoding, sealing = np.arange(out.shape[1]), 0.0, 0.0
    for (stored, sizes), rows in zip(written, blocks, strict=True):
        words, starts = stored.copy(), np.cumsum(sizes) - sizes
        start = time.thread_time()
        seal_slices(words, starts, sizes)
        middle = time.thread_time()
        codec.decode(words, starts, sizes, rows, columns, out)
        decoding += time.thread_time() - middle
        sealing += middle - start
    return decoding, sealing


def _as_metrics(seconds: dict[str, float], size: int) -> dict[str, Any]:
    by_codec = {
        name: {
            **{
                f"{verb}_mbs": round(size / seconds[f"{name} {verb}"] / 1e6)
                for verb in ("encode", "decode", "save", "load")
            },
            "digest_share": round(seconds[f"{name} decode, part 1"] / seconds[f"{name} decode"], 4),
            "partial_read_share": round(seconds[f"{name} part"] / seconds[f"{name} load"], 4),
        }
        for name in CODECS
    }
    return {**by_codec["planes"], "codecs": by_codec, "megabytes": round(size / 1e6)}


def _medians(jobs: dict[str, Job], rounds: int) -> dict[str, float]:
    """Median seconds of the parts of every job, run in turn, after one turn that warms up."""
    times: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            for part, spent in enumerate(job()):
                if turn:
                    times.setdefault(f"{name}, part {part}" if part else name, []).append(spent)
    return {name: statistics.median(spent) for name, spent in times.items()}


def _bit_planes_bytes(trace: RoutingTrace) -> float:
    """Bytes per token and layer of zstd-3 on one bit per expert and token, expert by expert, in the layers drawn."""
    import zstandard

    compressor, total = zstandard.ZstdCompressor(level=3), 0
    for s in range(len(trace)):
        own = slice(int(trace.offsets[s]), int(trace.offsets[s + 1]))
        ids_TLK = trace.expert_ids_NLK[own][trace.valid_N[own], :MADE_LAYERS].astype(np.int64)
        hot_TLE = np.zeros((*ids_TLK.shape[:2], trace.spec.num_experts), np.bool_)
        np.put_along_axis(hot_TLE, ids_TLK, True, axis=-1)
        total += len(compressor.compress(np.packbits(hot_TLE.transpose(1, 2, 0), axis=-1).tobytes()))
    return total / (int(trace.valid_N.sum()) * min(MADE_LAYERS, trace.spec.num_layers))
