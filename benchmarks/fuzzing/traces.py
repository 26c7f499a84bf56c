"""Trace and generation files, which have checksums."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.fuzzing.mutations import damage, forge, put_checksum_right
from benchmarks.fuzzing.target import Target, written
from foreroute.capture import Generation, load_generation, save_generation
from foreroute.trace import (
    ENCODINGS,
    GATE_WEIGHTS,
    INDEXER,
    DecisionStream,
    Encoding,
    GateWeights,
    IndexerSpec,
    RoutedLayer,
    RoutingSpec,
    RoutingTrace,
    concatenate,
    load,
    synthetic_trace,
)
from foreroute.trace.file import FORMAT, FRAMES, encode

MODELS = ((8, 2, 3), (128, 8, 2), (300, 2, 1), (5, 1, 1))


def trace_targets(folder: Path) -> list[Target]:
    """The reader of traces, per encoding, with streams, whole and in part, and the reader of generations."""
    whole = [
        Target(
            name=f"trace, {encoding}",
            make=_maker(encoding),
            read=lambda raw: load(written(raw, folder / "trace")),
            same=_same_trace,
            forge=forge_trace,
            check=lambda raw, trace: require_possible(trace),
            has_checksum=True,
            weight=3.0,
        )
        for encoding in ENCODINGS
    ]
    beside = [
        Target(
            name=f"trace, {name}",
            make=_maker_with(add),
            read=lambda raw: load(written(raw, folder / "streams")),
            same=_same_trace,
            forge=forge_trace,
            check=lambda raw, trace: require_possible(trace),
            has_checksum=True,
            weight=3.0,
        )
        for name, add in (("streams", _with_streams), ("indexers", _with_choices))
    ]
    part = Target(
        name="trace, in part",
        make=_maker("sets"),
        read=lambda raw: load(written(raw, folder / "part"), sequences=[3, 0]),
        same=_same_trace,
        forge=forge_trace,
        check=lambda raw, trace: require_possible(trace),
        has_checksum=True,
        weight=2.0,
    )
    generation = Target(
        name="generation",
        make=lambda rng: _generation_bytes(rng, folder),
        read=lambda raw: load_generation(written(raw, folder / "rollout.safetensors")),
        same=_same_generation,
        forge=forge,
        check=lambda raw, generation: _require_generation(generation),
        has_checksum=True,
    )
    return [*whole, *beside, part, generation]


def require_possible(trace: RoutingTrace) -> None:
    """Raise unless a trace can be true, by rules written out here: none of the reader's own checks is asked."""
    spec, offsets = trace.spec, [int(x) for x in trace.offsets]
    rows = len(trace.token_ids_N)
    assert offsets[0] == 0, offsets
    assert offsets[-1] == rows, offsets
    assert all(a <= b for a, b in pairwise(offsets)), offsets
    assert trace.expert_ids_NLK.shape == (rows, spec.num_layers, spec.top_k)
    assert trace.expert_ids_NLK.dtype == (np.uint8 if spec.num_experts <= 256 else np.uint16)
    assert trace.valid_N.shape == trace.weight_versions_N.shape == (rows,)
    assert len({(layer.index, layer.kind) for layer in spec.layers}) == spec.num_layers
    assert all(type(layer.index) is int and layer.index >= 0 for layer in spec.layers)
    assert (trace.weight_versions_N >= -1).all()
    assert (trace.token_ids_N >= 0).all()
    for row in trace.expert_ids_NLK[trace.valid_N].reshape(-1, spec.top_k).tolist():
        assert len(set(row)) == spec.top_k, row
        assert max(row) < spec.num_experts, row
    if trace.gate_weights_NLK is not None:
        assert trace.gate_weights_NLK.shape == trace.expert_ids_NLK.shape
        assert np.isfinite(trace.gate_weights_NLK).all()
    for stream in (each for each in trace.streams.values() if isinstance(each, DecisionStream)):
        depth = max(1, len(stream.layers))
        ends = stream.offsets.tolist()
        assert (len(stream.valid_N), len(ends) - 1, ends[-1]) == (rows, rows * depth, len(stream.ids))
        for i, (a, b) in enumerate(pairwise(ends)):
            ids = stream.ids[a:b].tolist()
            assert ids == sorted(set(ids)), ids
            assert all(0 <= x < stream.num_choices for x in ids), ids
            assert stream.valid_N[i // depth] or not ids


def forge_trace(raw: bytes, rng: np.random.Generator) -> bytes:
    """Changed tables and metadata, or changed contents of frames, or both; with right checksums of everything."""
    kind = rng.random()
    changed = _with_changed_contents(raw, rng) if kind < 0.6 else raw
    return changed if kind < 0.4 else forge(changed, rng, apart=FORMAT.apart)


def _with_changed_contents(raw: bytes, rng: np.random.Generator) -> bytes:
    from safetensors.numpy import load as tensors_of

    tensors, (metadata, _) = dict(tensors_of(raw)), _parsed(raw)
    contents = frame_contents(tensors)
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(len(contents)))
        size = len(contents[place])
        changed = damage(contents[place], rng) or b"\0"
        contents[place] = changed if rng.random() < 0.3 else (changed + bytes(size))[:size]
    set_contents(tensors, contents)
    put_checksum_right(tensors, metadata, apart=FORMAT.apart)
    return _file_of(metadata, tensors)


def frame_contents(tensors: dict[str, NDArray[Any]]) -> list[bytes]:
    """What the frames of a sound file hold, chunk by chunk."""
    ends = np.cumsum(tensors["frame_bytes"].reshape(-1)).tolist()
    frames = tensors[FRAMES].tobytes()
    return [zstandard.ZstdDecompressor().decompress(frames[a:b]) for a, b in pairwise([0, *ends])]


def set_contents(tensors: dict[str, NDArray[Any]], contents: list[bytes]) -> None:
    """Put frames that hold something else into the tensors, with right sizes and checksums of their own."""
    compressor, shape = zstandard.ZstdCompressor(write_checksum=True), tensors["frame_bytes"].shape
    frames = [compressor.compress(content) for content in contents]
    tensors["frame_bytes"] = np.array([len(frame) for frame in frames], np.int64).reshape(shape)
    tensors["content_bytes"] = np.array([len(content) for content in contents], np.int64).reshape(shape)
    tensors[FRAMES] = np.frombuffer(b"".join(frames), np.uint8)


def _parsed(raw: bytes) -> tuple[dict[str, str], bytes]:
    size = int.from_bytes(raw[:8], "little")
    metadata: dict[str, str] = json.loads(raw[8 : 8 + size])["__metadata__"]
    return metadata, raw[8 + size :]


def _file_of(metadata: dict[str, str], tensors: dict[str, NDArray[Any]]) -> bytes:
    from safetensors.numpy import save

    raw: bytes = save(tensors, metadata=metadata)
    return raw


def _maker(encoding: Encoding) -> Callable[[np.random.Generator], bytes]:
    return lambda rng: trace_bytes(rng, encoding)


def _maker_with(
    add: Callable[[RoutingTrace, np.random.Generator], RoutingTrace],
) -> Callable[[np.random.Generator], bytes]:
    return lambda rng: FORMAT.to_bytes(*encode(add(_trace(rng), rng), ENCODINGS[int(rng.integers(2))]))


def trace_bytes(rng: np.random.Generator, encoding: Encoding) -> bytes:
    """A file of four sequences, of which two share their prompt."""
    return FORMAT.to_bytes(*encode(_trace(rng), encoding))


def _trace(rng: np.random.Generator) -> RoutingTrace:
    num_experts, top_k, num_layers = MODELS[int(rng.integers(len(MODELS)))]
    spec = RoutingSpec(num_experts, top_k, tuple(RoutedLayer(i) for i in range(num_layers)), model="fuzz")
    seed = int(rng.integers(2**31))
    prompt = synthetic_trace(spec, [20], seed=seed, complete=True).select([0, 0])
    samples = prompt.continued_by(synthetic_trace(spec, rng.integers(1, 9, 2).tolist(), seed=seed, weight_version=3))
    return concatenate([samples, synthetic_trace(spec, rng.integers(1, 90, 2).tolist(), seed=seed)])


def _with_streams(trace: RoutingTrace, rng: np.random.Generator) -> RoutingTrace:
    """Gate weights, sampling masks, and an indexer in two layers; every kind of row is among them."""
    for name, choices, layers in (("sampling", 50, ()), ("indexer", 2**31 - 1, (RoutedLayer(0), RoutedLayer(3)))):
        valid = rng.random(trace.num_rows) < 0.7
        counts = rng.integers(0, 6, (trace.num_rows, max(1, len(layers)))) * valid[:, None]
        # those of the indexer are taken from few ids, so that sets resemble each other
        ids = [7 * rng.choice(8 if layers else choices // 7, n, replace=False) for n in counts.reshape(-1)]
        stream = DecisionStream.from_sets(choices, valid, counts, np.concatenate(ids), layers=layers)
        trace = trace.with_stream(name, stream)
    weights = GateWeights.from_values(rng.random(trace.expert_ids_NLK.shape), trace.valid_N)
    return trace.with_stream(GATE_WEIGHTS, weights)


def _with_choices(trace: RoutingTrace, rng: np.random.Generator) -> RoutingTrace:
    """Choices of indexers that last from query to query, so that sets resemble each other."""
    spec = IndexerSpec(int(rng.integers(1, 12)), (RoutedLayer(0), RoutedLayer(3)), heads=int(rng.integers(1, 3)))
    positions = trace.positions_N
    chosen = []
    for _ in spec.layers:
        scores_UH, sets = rng.random((int(positions.max()) + 1, spec.heads)), []
        for seen in spec.num_visible(positions).tolist():
            scores_UH += 0.1 * rng.standard_normal(scores_UH.shape)
            units_KH = np.argsort(scores_UH[:seen], axis=0)[-spec.top_k :]
            sets.append(np.sort((units_KH * spec.heads + np.arange(spec.heads)).reshape(-1)))
        chosen.append((np.array([len(each) for each in sets]), np.concatenate(sets).astype(np.int32)))
    return trace.with_stream(INDEXER, spec.stream(positions, chosen))


def _generation_bytes(rng: np.random.Generator, folder: Path) -> bytes:
    """The generation beside its trace; the trace stays in the folder, undamaged."""
    trace = _trace(rng)
    prompts = np.ones(len(trace), np.int64)
    trace = trace.select(np.flatnonzero(trace.lengths > 1))
    prompts = prompts[: len(trace)]
    logprobs = -rng.random(int((trace.lengths - prompts).sum())).astype(np.float32)
    path = save_generation(Generation(trace, prompts, logprobs), folder / "rollout.safetensors", overwrite=True)
    return path.read_bytes()


def _same_trace(a: RoutingTrace, b: RoutingTrace) -> bool:
    return a.equals(b) and a.provenance == b.provenance


def _require_generation(generation: Generation) -> None:
    assert len(generation.logprobs_R) == int(generation.sampled_N.sum())
    assert len(generation.sampled_N) == generation.trace.num_rows
    assert (generation.prompt_lengths >= 1).all()


def _same_generation(a: Generation, b: Generation) -> bool:
    return (
        a.trace.equals(b.trace)
        and np.array_equal(a.prompt_lengths, b.prompt_lengths)
        and np.array_equal(a.logprobs_R.view(np.uint32), b.logprobs_R.view(np.uint32))
        and np.array_equal(a.sampled_N, b.sampled_N)
    )
