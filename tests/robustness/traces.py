"""Trace and generation files, which have checksums, and the wires that traces are read from, which have none."""

import base64
import json
from itertools import pairwise

import numpy as np
from safetensors.numpy import load as tensors_of
from safetensors.numpy import save as file_of

from foreroute.capture import Generation, decode, load_generation, save_generation
from foreroute.testing.routes import synthetic_trace
from foreroute.trace import ENCODINGS, IndexerSpec, RoutedLayer, RoutingSpec, RoutingTrace, concatenate, load
from foreroute.trace.file import FORMAT, encode
from tests import wires
from tests.robustness.mutations import damage, forge, forge_json, metadata_of, put_checksum_right
from tests.robustness.target import Target
from tests.trace.forging import frame_contents, set_contents
from tests.traces import foreign_choices, with_decisions

ROLLOUT = wires.rollout(np.random.default_rng(7))
SAMPLE_TRACE = RoutingTrace.from_sequences(ROLLOUT.spec, [ROLLOUT.tokens], [ROLLOUT.routes_RLK])
"""The routes of every valid sample."""
MODELS = (((8, 2),) * 3, ((128, 8),) * 2, ((300, 2),), ((5, 1),), ((256, 2), (5, 1), (300, 3)), ((8, 1), (8, 3)))
"""Experts and picks of each layer."""


def trace_targets(folder):
    """The reader of traces, per encoding, with streams, whole and in part, and the reader of generations."""

    def target(name, make, weight, read=load, check=require_possible, file="given.trace"):
        how = {"forge": forge_trace, "check": check, "has_checksum": True}
        return Target(name, make, read, file=folder / file, weight=weight, **how)

    def in_part(path):
        return load(path, sequences=[3, 0])

    def saved(rng):
        """A generation in a file, of two or more tokens a sequence."""
        trace = _trace(rng)
        trace = trace.select(np.flatnonzero(trace.lengths > 1))
        prompts = np.ones(len(trace), np.int64)
        logprobs = -rng.random(int((trace.lengths - prompts).sum())).astype(np.float32)
        return save_generation(Generation(trace, prompts, logprobs), rollout, overwrite=True).read_bytes()

    rollout = folder / "given.safetensors"
    return [
        *(target(f"trace, {each}", lambda rng, each=each: bytes_of(_trace(rng), each), 3) for each in ENCODINGS),
        target("trace, streams", lambda rng: bytes_of(with_decisions(_trace(rng), rng), _either(rng)), 3),
        target("trace, indexers", lambda rng: bytes_of(_with_choices(_trace(rng), rng), _either(rng)), 3),
        target("trace, in part", lambda rng: bytes_of(_trace(rng), "sets"), 2, in_part),
        target("generation", saved, 1, load_generation, _require_generation, rollout.name),
    ]


def require_possible(raw, trace):
    """Raise unless a trace can be true."""
    spec, offsets = trace.spec, [int(x) for x in trace.offsets]
    rows = len(trace.token_ids_N)
    assert (offsets[0], offsets[-1]) == (0, rows), offsets
    assert all(a <= b for a, b in pairwise(offsets)), offsets
    assert trace.expert_ids_NLK.shape == (rows, spec.num_layers, spec.top_k)
    has_filler = len({top_k for _, top_k in spec.sizes_L}) > 1
    assert trace.expert_ids_NLK.dtype == (np.uint8 if spec.num_experts + has_filler <= 256 else np.uint16)
    assert trace.valid_N.shape == trace.weight_versions_N.shape == (rows,)
    assert len({(layer.index, layer.kind) for layer in spec.layers}) == spec.num_layers
    assert all(type(layer.index) is int and layer.index >= 0 for layer in spec.layers)
    assert (trace.weight_versions_N >= -1).all()
    assert (trace.token_ids_N >= 0).all()
    for layers in trace.expert_ids_NLK[trace.valid_N].tolist():
        for row, (num_experts, top_k) in zip(layers, spec.sizes_L, strict=True):
            assert len(set(row[:top_k])) == top_k, row
            assert max(row[:top_k]) < num_experts, row
            assert set(row[top_k:]) <= {np.iinfo(spec.id_dtype).max}, row
    for stream in trace.streams.values():
        depth = max(1, len(stream.layers))
        ends = stream.offsets.tolist()
        assert (len(stream.valid_N), len(ends) - 1, ends[-1]) == (rows, rows * depth, len(stream.ids))
        for i, (a, b) in enumerate(pairwise(ends)):
            ids = stream.ids[a:b].tolist()
            assert ids == sorted(set(ids)), ids
            assert all(0 <= x < stream.num_choices for x in ids), ids
            assert stream.valid_N[i // depth] or not ids


def forge_trace(raw, rng):
    """Changed tables and metadata, or changed contents of frames, or both; with right checksums of everything."""
    draw = rng.random()
    changed = _with_changed_contents(raw, rng) if draw < 0.6 else raw
    return changed if draw < 0.4 else forge(changed, rng, apart=FORMAT.apart)


def _with_changed_contents(raw, rng):
    tensors, metadata = tensors_of(raw), metadata_of(raw)
    contents = frame_contents(tensors)
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(len(contents)))
        size = len(contents[place])
        changed = damage(contents[place], rng) or b"\0"
        contents[place] = changed if rng.random() < 0.3 else (changed + bytes(size))[:size]
    set_contents(tensors, contents)
    put_checksum_right(tensors, metadata, apart=FORMAT.apart)
    return file_of(tensors, metadata=metadata)


def bytes_of(trace, encoding):
    return FORMAT.to_bytes(*encode(trace, encoding))


def _either(rng):
    return ENCODINGS[int(rng.integers(2))]


def _trace(rng):
    """Four sequences, of which two share their prompt."""
    sizes, seed = MODELS[int(rng.integers(len(MODELS)))], int(rng.integers(2**31))
    spec = RoutingSpec.of_sizes(map(RoutedLayer, range(len(sizes))), sizes, "test")
    prompt = synthetic_trace(spec, [20], seed=seed, complete=True).select([0, 0])
    samples = prompt.continued_by(synthetic_trace(spec, rng.integers(1, 9, 2).tolist(), seed=seed, weight_version=3))
    return concatenate([samples, synthetic_trace(spec, rng.integers(1, 90, 2).tolist(), seed=seed)])


def _with_choices(trace, rng):
    layers = (RoutedLayer(0), RoutedLayer(3))
    return foreign_choices(
        trace, IndexerSpec(int(rng.integers(1, 12)), layers, heads=int(rng.integers(1, 3))), seed=rng
    )


def _require_generation(raw, generation):
    require_possible(raw, generation.trace)
    assert len(generation.logprobs_R) == int(generation.sampled_N.sum())
    assert len(generation.sampled_N) == generation.trace.num_rows
    assert (generation.prompt_lengths >= 1).all()


def wire_targets(folder):
    """The decoder of every wire. None has a checksum: a byte that turns one plausible row into another is not seen."""
    table = base64.b64encode(ROLLOUT.routes_RLK.astype(np.uint8).tobytes()).decode()
    samples = {
        "vllm-http": wires.vllm_http(ROLLOUT).encode(),
        "npy": wires.npy(ROLLOUT.all_layers().astype(np.uint8)),
        "sglang": wires.sglang(ROLLOUT).encode(),
        "sglang-openai": wires.sglang_openai(ROLLOUT).encode(),
        "lists": json.dumps(ROLLOUT.routes_RLK.tolist()).encode(),
        "table": json.dumps({"data": table, "shape": [11, 4, 3], "dtype": "uint8"}).encode(),
    }
    return [
        Target(name, lambda rng, sample=sample: sample, _decode_wire, forge=forge_json, check=_require_same_tokens)
        for name, sample in samples.items()
    ]


def _decode_wire(raw):
    return decode(raw, model=ROLLOUT.spec, token_ids=ROLLOUT.tokens)


def _require_same_tokens(raw, trace):
    require_possible(raw, trace)
    assert trace.spec == SAMPLE_TRACE.spec
    assert np.array_equal(trace.token_ids_N, SAMPLE_TRACE.token_ids_N)
    assert np.array_equal(trace.valid_N, SAMPLE_TRACE.valid_N)
