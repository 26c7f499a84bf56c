"""A second reader of whole files, written from docs/formats.md: what it reads is what was saved."""

import json
import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

import foreroute as fr
from foreroute.trace import CODECS
from tests.trace.payload_oracle import read_fixed, read_planes, read_rice
from tests.trace.test_streams import sets_of
from tests.traces import mixed_trace, with_decisions

DTYPES = {"I64": "<i8", "I32": "<i4", "U8": "u1", "U32": "<u4", "U64": "<u8"}


def contents(raw):
    """Metadata, and every tensor as an array with its raw bytes."""
    size = struct.unpack("<Q", raw[:8])[0]
    head, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    metadata = head.pop("__metadata__")
    tensors = {}
    for name, entry in head.items():
        piece = data[slice(*entry["data_offsets"])]
        tensors[name] = np.frombuffer(piece, DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return metadata, tensors


def digest_of(metadata, tensors):
    parts = []
    for key in sorted(key for key in metadata if key.startswith("foreroute.") and key != "foreroute.digest"):
        value = metadata[key].encode()
        parts.append(f"{key}:{len(value)}:".encode() + value)
    bulk = {"token_ids", "valid_bits", *(name for name in tensors if name.endswith("payloads"))}
    for name in sorted(set(tensors) - bulk):
        tensor = tensors[name]
        kind = f"{tensor.dtype.kind}{tensor.dtype.itemsize}"
        parts.append(f"{name}:{kind}:{'x'.join(map(str, tensor.shape))}:".encode() + tensor.tobytes())
    return xxh3_128_hexdigest(b"".join(parts))


def stored_rows(metadata, tensors):
    """(token, version, valid, ids per layer) of every stored row; every seal is checked on the way."""
    spec = json.loads(metadata["foreroute.spec"])
    top_k, num_experts, num_layers = spec["top_k"], spec["num_experts"], len(spec["layers"])
    width = 8 if num_experts <= 256 else 16
    if metadata["foreroute.codec"] == "packed":
        width = max(1, (num_experts - 1).bit_length())
    tokens, starts = tensors["token_ids"].tolist(), tensors["block_starts"].tolist()
    valid = [bool(tensors["valid_bits"][u // 8] >> (u % 8) & 1) for u in range(len(tokens))]
    spans = dict(zip(tensors["span_starts"].tolist(), tensors["span_versions"].tolist(), strict=True))
    rows, place, version = [], 0, None
    for b, (start, stop) in enumerate(pairwise(starts)):
        sealed = tensors["token_ids"][start:stop].tobytes() + bytes(valid[start:stop])
        assert xxh3_128_digest(sealed) == tensors["row_seals"][b].tobytes()
        routed, layers = sum(valid[start:stop]), []
        for layer in range(num_layers):
            size = int(tensors["payload_words"][b, layer])
            words, place = tensors["payloads"][place : place + size], place + size
            assert xxh3_128_digest(words.tobytes()) == tensors["payload_seals"][b, layer].tobytes()
            if not routed:
                layers.append([])
            elif metadata["foreroute.codec"] == "planes":
                layers.append(read_planes(words, routed, num_experts, top_k, tensors["code_lengths"].tolist()))
            else:
                layers.append(read_fixed(words, routed, top_k, width))
        by_row = iter(zip(*layers, strict=True))
        for u in range(start, stop):
            version = spans.get(u, version)
            ids = [list(picks) for picks in next(by_row)] if valid[u] else [[0] * top_k] * num_layers
            rows.append((tokens[u], version, valid[u], ids))
    return rows


def stored_sets(entry, tensors):
    """None, or a set for each layer, of every stored row; every seal is checked on the way."""
    name, rows, place = entry["name"], [], 0
    for b, (start, stop) in enumerate(pairwise(tensors["block_starts"].tolist())):
        layers = []
        for layer in range(max(1, len(entry["layers"]))):
            size = int(tensors[f"{name}.payload_words"][b, layer])
            words, place = tensors[f"{name}.payloads"][place : place + size], place + size
            assert xxh3_128_digest(words.tobytes()) == tensors[f"{name}.payload_seals"][b, layer].tobytes()
            choices, by_change = entry["num_choices"], entry["codec"] == "rice-changes"
            sets = read_rice(words, stop - start, choices, by_change=by_change) if size else [None] * (stop - start)
            layers.append(sets)
            assert sum(len(ids or []) for ids in layers[-1]) == tensors[f"{name}.id_counts"][b, layer]
        rows += [None if None in sets else list(sets) for sets in zip(*layers, strict=True)]
    return rows


def stored_weights(metadata, tensors):
    """The weights of every stored row, zeros where it is not routed."""
    spec, place, rows = json.loads(metadata["foreroute.spec"]), 0, []
    top_k, num_layers = spec["top_k"], len(spec["layers"])
    valid = np.unpackbits(tensors["valid_bits"], bitorder="little").astype(bool)
    for b, (start, stop) in enumerate(pairwise(tensors["block_starts"].tolist())):
        weights = np.zeros((stop - start, num_layers, top_k), np.float32)
        for layer in range(num_layers):
            size = int(tensors["gate_weights.payload_words"][b, layer])
            raw, place = tensors["gate_weights.payloads"][place : place + size].tobytes(), place + size
            assert xxh3_128_digest(raw) == tensors["gate_weights.payload_seals"][b, layer].tobytes()
            count = int(valid[start:stop].sum()) * top_k
            weights[valid[start:stop], layer] = np.frombuffer(raw, "<f4")[:count].reshape(-1, top_k)
        rows += weights.tolist()
    return rows


def sequences_of(raw):
    metadata, tensors = contents(raw)
    assert digest_of(metadata, tensors) == metadata["foreroute.digest"]
    rows, runs = stored_rows(metadata, tensors), tensors["run_offsets"].tolist()
    entries = {entry.pop("name"): entry for entry in json.loads(metadata["foreroute.streams"])}
    if entries:
        assert entries.pop("gate_weights") == {"codec": "float32"}
        assert {entry["codec"] for entry in entries.values()} <= {"rice", "rice-changes"}
        beside = [stored_sets({"name": name, **entries[name]}, tensors) for name in sorted(entries)]
        rows = [*zip(rows, stored_weights(metadata, tensors), *beside, strict=True)]
    return [
        [row for q in range(a, b) for row in rows[int(tensors["run_starts"][q]) :][: int(tensors["run_lengths"][q])]]
        for a, b in pairwise(runs)
    ]


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_reader_written_from_the_specification_agrees(codec, seed, tmp_path_factory):
    trace = with_decisions(mixed_trace(seed), seed) if seed % 2 else mixed_trace(seed)
    raw = fr.save(trace, tmp_path_factory.mktemp("trace") / "t", codec=codec).read_bytes()
    trace = trace.without_pick_order() if codec == "planes" else trace
    beside = [sets_of(trace.streams[name]) for name in sorted(trace.streams)]

    def row(n):
        routes = (
            int(trace.token_ids_N[n]),
            int(trace.weight_versions_N[n]),
            bool(trace.valid_N[n]),
            trace.expert_ids_NLK[n].tolist(),
        )
        decided = [sets[n] for sets in beside]
        return (routes, trace.gate_weights_NLK[n].tolist(), *decided) if beside else routes

    expected = [[row(n) for n in range(trace.offsets[s], trace.offsets[s + 1])] for s in range(len(trace))]
    assert sequences_of(raw) == expected
