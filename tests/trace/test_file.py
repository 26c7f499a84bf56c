"""Traces on disk: round trips, and every way a file can be wrong."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import foreroute as fr
from foreroute.errors import TraceFileError
from traces import random_trace


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_round_trip(seed, tmp_path_factory):
    trace = random_trace(seed).with_provenance(engine="test")
    path = fr.save(trace, tmp_path_factory.mktemp("trace") / "t.safetensors")
    loaded = fr.load(path)
    assert loaded.equals(trace)
    assert loaded.spec == trace.spec
    assert loaded.provenance == trace.provenance


def test_round_trip_of_no_sequences(tmp_path):
    trace = random_trace(0).select([])
    assert fr.load(fr.save(trace, tmp_path / "t")).equals(trace)


def test_saving_never_replaces_unless_told(tmp_path):
    path = fr.save(random_trace(0), tmp_path / "t")
    before = path.read_bytes()
    with pytest.raises(TraceFileError, match="already exists"):
        fr.save(random_trace(1), path)
    assert path.read_bytes() == before
    fr.save(random_trace(1), path, overwrite=True)
    assert fr.load(path).equals(random_trace(1))
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = fr.save(random_trace(0), tmp_path / "t")

    def full_disk(tensors, target, metadata):
        target_file = open(target, "wb")  # noqa: SIM115
        target_file.write(b"half")
        target_file.close()
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.numpy.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        fr.save(random_trace(1), path, overwrite=True)
    assert fr.load(path).equals(random_trace(0))
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_every_truncation_is_refused(tmp_path):
    whole = fr.save(random_trace(0), tmp_path / "t").read_bytes()
    torn = tmp_path / "torn"
    for size in range(0, len(whole), 7):
        torn.write_bytes(whole[:size])
        with pytest.raises(TraceFileError):
            fr.load(torn)


def test_every_flipped_byte_of_the_data_is_refused(tmp_path):
    whole = bytearray(fr.save(random_trace(3), tmp_path / "t").read_bytes())
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    torn = tmp_path / "torn"
    for position in range(start, len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x01
        torn.write_bytes(damaged)
        try:
            loaded = fr.load(torn)
        except TraceFileError:
            continue
        assert loaded.equals(random_trace(3)), f"byte {position} changed the trace unseen"


def rewritten(tmp_path, *, header=(), tensors=()):
    path = fr.save(random_trace(0), tmp_path / "good")
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    metadata = {**json.loads(raw[8 : 8 + length])["__metadata__"], **dict(header)}
    arrays = {**load_file(path), **dict(tensors)}
    bad = tmp_path / "bad"
    save_file({k: v for k, v in arrays.items() if v is not None}, bad, {k: v for k, v in metadata.items() if v})
    return bad


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"foreroute.version": None}, "not a routing trace"),
        ({"foreroute.version": "99"}, "Upgrade foreroute"),
        ({"foreroute.spec": "{"}, "damaged"),
        ({"foreroute.spec": "[]"}, "damaged"),
        ({"foreroute.spec": None}, "damaged"),
        ({"foreroute.spec": '{"num_experts": 8, "top_k": 2, "layers": [[0, "sideways"]], "model": ""}'}, "damaged"),
        ({"foreroute.provenance": "3"}, "damaged"),
        ({"foreroute.provenance": '{"engine": "another"}'}, "its digest is"),
        ({"foreroute.codec": "zip"}, "damaged"),
        ({"foreroute.pick_order": "lost"}, "damaged"),
        ({"foreroute.another": "x"}, "unknown"),
        ({"foreroute.digest": "0" * 32}, "its digest is"),
    ],
)
def test_wrong_headers_are_refused(tmp_path, header, message):
    with pytest.raises(TraceFileError, match=message):
        fr.load(rewritten(tmp_path, header=header))


@pytest.mark.parametrize(
    "tensors",
    [
        {"payloads": None},
        {"payloads": np.zeros(3, np.int64)},
        {"payloads": np.zeros(1, np.uint64)},
        {"payload_words": np.zeros((1, 3), np.int64)},
        {"payload_words": np.full((1, 3), 1 << 31, np.uint32)},
        {"payload_seals": np.zeros((1, 3, 8), np.uint8)},
        {"row_seals": None},
        {"run_offsets": np.array([0, 5, 3], np.int64)},
        {"run_offsets": np.zeros(0, np.int64)},
        {"run_lengths": np.array([1 << 62], np.int64)},
        {"block_starts": np.array([0, 1 << 40], np.int64)},
        {"span_starts": np.array([1], np.int64), "span_versions": np.array([0], np.int32)},
        {"token_ids": np.zeros(1, np.int32)},
        {"token_ids": np.zeros((1, 1), np.int32)},
        {"valid_bits": None},
        {"another": np.zeros(1, np.int32)},
    ],
)
def test_wrong_tensors_are_refused(tmp_path, tensors):
    with pytest.raises(TraceFileError, match="damaged"):
        fr.load(rewritten(tmp_path, tensors=tensors))


def test_missing_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(TraceFileError, match="does not exist"):
        fr.load(tmp_path / "nothing")
    (tmp_path / "text").write_text("this is no trace at all")
    with pytest.raises(TraceFileError, match="not a readable trace"):
        fr.load(tmp_path / "text")
