"""A second reader of whole files, written from docs/formats.md: what it reads is what was saved.

Up to the line below, nothing of foreroute is used: what the page says suffices.
"""

import hashlib
import json
import struct

import numpy as np
import zstandard

TYPES = {"I64": "<i8", "U32": "<u4", "U16": "<u2", "U8": "u1"}


def opened(raw):
    """Metadata, and each tensor with its type in the header."""
    size = struct.unpack("<Q", raw[:8])[0]
    assert size <= 1 << 20
    head, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    metadata = head.pop("__metadata__")
    tensors = {}
    for name, entry in head.items():
        flat = np.frombuffer(data[slice(*entry["data_offsets"])], TYPES[entry["dtype"]])
        tensors[name] = entry["dtype"], flat.reshape(entry["shape"])
    assert set(tensors) == {"lengths", "chunk_rows", "frame_bytes", "content_bytes", "frames"}
    return metadata, tensors


def checksum(metadata, tensors):
    ours = {k: v for k, v in metadata.items() if k.startswith("foreroute.") and k != "foreroute.checksum"}
    fields = [str(len(ours)).encode()]
    for key in sorted(ours):
        fields += [key.encode(), ours[key].encode()]
    for name in sorted(set(tensors) - {"frames"}):
        dtype, tensor = tensors[name]
        fields += [name.encode(), dtype.encode(), "x".join(map(str, tensor.shape)).encode(), tensor.tobytes()]
    return hashlib.blake2b(b"".join(b"%d:%b" % (len(f), f) for f in fields), digest_size=16).hexdigest()


def numbers(content, count, size):
    """`count` numbers of `size` bytes from the beginning of a content, and what follows them."""
    planes = [content[b * count : (b + 1) * count] for b in range(size)]
    return [int.from_bytes(bytes(each), "little") for each in zip(*planes, strict=True)], content[size * count :]


def signed(value):
    return value - (1 << 32) if value >> 31 else value


def read(raw):
    """What the file says of itself; and each sequence as rows of (token, version, ids, decisions by stream)."""
    metadata, tensors = opened(raw)
    assert metadata["foreroute.trace"] == "3"
    assert checksum(metadata, tensors) == metadata["foreroute.checksum"]
    tables = {name: tensor for name, (_, tensor) in tensors.items()}
    layers, streams = json.loads(metadata["foreroute.layers"]), json.loads(metadata["foreroute.streams"])
    frames, place, rows = tables["frames"].tobytes(), 0, []
    for chunk, count in enumerate(tables["chunk_rows"].tolist()):
        contents = []
        for stored, size in zip(tables["frame_bytes"][chunk], tables["content_bytes"][chunk], strict=True):
            frame, place = frames[place : place + int(stored)], place + int(stored)
            stated = zstandard.get_frame_parameters(frame)
            assert (stated.content_size, stated.has_checksum) == (size, True)
            contents.append(zstandard.ZstdDecompressor().decompress(frame))
        rows += rows_of_chunk(metadata["foreroute.encoding"], layers, streams, contents, count)
    assert place == len(frames)
    ends = np.cumsum(tables["lengths"]).tolist()
    return metadata, [rows[end - length : end] for end, length in zip(ends, tables["lengths"].tolist(), strict=True)]


def rows_of_chunk(encoding, layers, streams, contents, count):
    tokens, rest = numbers(contents[0], count, 4)
    versions, valid = numbers(rest, count, 4)
    assert len(valid) == count
    of_layers = zip(layers, contents[1:], strict=False)
    picks = [picks_of_layer(encoding, *layer[2:], content, valid) for layer, content in of_layers]
    columns, at = [zip(*picks, strict=True)], 1 + len(layers)
    for entry in streams:
        assert entry["kind"] == "sets"
        taken = max(1, len(entry["layers"]))
        each = [sets_of_layer(content, count) for content in contents[at : at + taken]]
        columns.append([None if row[0] is None else list(row) for row in zip(*each, strict=True)])
        at += taken
    assert at == len(contents)
    beside = zip(*columns, strict=True)
    return [
        (token, signed(version), list(row[0]) if there else None, list(row[1:]))
        for token, version, there, row in zip(tokens, versions, valid, beside, strict=True)
    ]


def picks_of_layer(encoding, num_experts, top_k, content, valid):
    columns = []
    for _ in range(top_k):
        column, content = numbers(content, len(valid), 1 if num_experts <= 256 else 2)
        columns.append(column)
    rows = [list(row) for row in zip(*columns, strict=True)]
    if encoding == "sets":
        for row, there in zip(rows, valid, strict=True):
            for k in range(1, top_k if there else 0):
                row[k] += row[k - 1] + 1
    return rows


def sets_of_layer(content, count):
    sizes, rest = numbers(content, count, 4)
    gaps = iter(numbers(rest, len(rest) // 4, 4)[0])
    sets = []
    for size in sizes:
        ids = []
        for _ in range(size - 1):
            ids.append(next(gaps) + (ids[-1] if ids else 0))
        sets.append(ids if size else None)
    assert next(gaps, None) is None
    return sets


# ---- from here on, files of foreroute are compared with what was read

from functools import partial  # noqa: E402

import pytest  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from foreroute.trace.file import ENCODINGS, FORMAT, encode  # noqa: E402
from tests.trace.test_file import small_chunks  # noqa: E402
from tests.traces import mixed_trace, picks_of, random_trace, sets_of, uneven_trace, with_decisions  # noqa: E402


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1),
    make=st.sampled_from([mixed_trace, *(partial(random_trace, num_experts=e) for e in (256, 400)), uneven_trace]),
    small=st.booleans(),
)
def test_a_reader_written_from_the_page_agrees(encoding, seed, make, small):
    trace = make(seed)
    trace = (with_decisions(trace, seed) if seed % 2 else trace).with_provenance(engine="ünïcode")
    with small_chunks(small):
        metadata, sequences = read(FORMAT.to_bytes(*encode(trace, encoding)))
    trace = trace.without_pick_order() if encoding == "sets" else trace
    picks = picks_of(trace)
    beside = [sets_of(trace.streams[name]) for name in sorted(trace.streams)]
    rows = [
        (int(trace.token_ids_N[n]), int(trace.weight_versions_N[n]), picks[n], [decisions[n] for decisions in beside])
        for n in range(trace.num_rows)
    ]
    assert sequences == [rows[a:b] for a, b in zip(trace.offsets[:-1], trace.offsets[1:], strict=True)]
    assert metadata["foreroute.model"] == "test"
    assert json.loads(metadata["foreroute.provenance"]) == trace.provenance
    assert json.loads(metadata["foreroute.layers"]) == [
        [layer.index, layer.kind, *size] for layer, size in zip(trace.spec.layers, trace.spec.sizes_L, strict=True)
    ]
