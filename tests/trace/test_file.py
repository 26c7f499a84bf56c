"""Traces on disk: round trips, and every way a file can be wrong."""

import json
import os
import resource
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import foreroute as fr
from foreroute.errors import SpecMismatchError, TraceContentError, TraceFileError
from foreroute.trace import CODECS, digest
from tests.traces import mixed_trace, random_trace, spec_of


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_round_trip(seed, tmp_path_factory):
    trace = random_trace(seed).with_provenance(engine="test")
    path = fr.save(trace, tmp_path_factory.mktemp("trace") / "t.safetensors")
    loaded = fr.load(path)
    assert loaded.equals(trace)
    assert loaded.spec == trace.spec
    assert loaded.provenance == trace.provenance


def as_read(trace, codec):
    return trace.without_pick_order() if codec == "planes" else trace


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), codec=st.sampled_from(CODECS), data=st.data())
def test_parts_are_what_selecting_from_the_whole_gives(seed, codec, data, tmp_path_factory):
    trace = mixed_trace(seed)
    path = fr.save(trace, tmp_path_factory.mktemp("trace") / "t.safetensors", codec=codec)
    expected = as_read(trace, codec)
    assert fr.load(path).equals(expected)
    sequences = data.draw(st.lists(st.integers(0, len(trace) - 1), max_size=5))
    layers = data.draw(st.lists(st.sampled_from(trace.spec.layers), min_size=1, unique=True))
    part = fr.load(path, sequences=sequences, layers=layers)
    assert part.equals(expected.select(sequences).select_layers(layers))
    assert part.spec.layers == tuple(layers)


@pytest.mark.parametrize("codec", CODECS)
def test_long_and_many_sequences_over_several_blocks(tmp_path, codec, monkeypatch):
    monkeypatch.setattr("foreroute.trace.file.writing.LEAST_ROWS", 8)
    monkeypatch.setattr("foreroute.trace.file.writing.ROWS_PER_EXPERT", 1)
    spec = spec_of(num_experts=8, top_k=2, num_layers=3)
    trace = fr.trace.synthetic_trace(spec, [3, 100, 0, 1, 7, 7, 7, 29, 2], seed=5)
    path = fr.save(trace, tmp_path / "t", codec=codec)
    assert len(load_file(path)["block_starts"]) > 10
    assert fr.load(path).equals(as_read(trace, codec))
    for s in range(len(trace)):
        part = fr.load(path, sequences=[s], layers=spec.layers[1:2])
        assert part.equals(as_read(trace, codec).select([s]).select_layers(spec.layers[1:2]))


@pytest.mark.parametrize("codec", CODECS)
def test_round_trip_of_nothing_and_of_rows_without_routes(tmp_path, codec):
    trace = as_read(random_trace(0), codec)
    unrouted = as_read(fr.RoutingTrace.unrouted(trace.spec, [[1, 2, 3], [], [4]]), codec)
    for i, some in enumerate([trace.select([]), unrouted, trace.truncated(trace.lengths * 0)]):
        assert fr.load(fr.save(some, tmp_path / f"{i}", codec=codec)).equals(some)


def test_a_trace_without_pick_order_stays_one(tmp_path):
    trace = random_trace(4)
    read = fr.load(fr.save(trace, tmp_path / "planes", codec="planes"))
    assert not read.pick_order_kept
    assert digest(read) == digest(trace.without_pick_order()) != digest(trace)
    again = fr.load(fr.save(read, tmp_path / "raw", codec="raw"))
    assert again.equals(read)
    assert not fr.concatenate([trace, read]).pick_order_kept


def test_impossible_routes_and_unknown_codecs_are_not_written(tmp_path):
    trace = random_trace(0)
    twice = replace(trace, expert_ids_NLK=np.zeros_like(trace.expert_ids_NLK))
    for codec in CODECS:
        with pytest.raises(TraceContentError, match="picked twice"):
            fr.save(twice, tmp_path / "t", codec=codec)
    with pytest.raises(TraceContentError, match="expected one of raw, packed, planes"):
        fr.save(trace, tmp_path / "t", codec="zip")
    assert list(tmp_path.iterdir()) == []


def test_parts_that_are_not_there_are_refused(tmp_path):
    trace = random_trace(0)
    path = fr.save(trace, tmp_path / "t")
    with pytest.raises(TraceContentError, match="was selected from"):
        fr.load(path, sequences=[len(trace)])
    with pytest.raises(SpecMismatchError, match="decoder 7 is not among"):
        fr.load(path, layers=[fr.RoutedLayer(7)])
    with pytest.raises(TraceContentError, match="layer table is empty"):
        fr.load(path, layers=[])


@pytest.mark.parametrize("sequences", [[False, False, True], [0.9, 1.7], ["0"], [None], [[0], [0, 1]]])
def test_masks_and_fractions_select_no_sequences(tmp_path, sequences):
    path = fr.save(fr.trace.synthetic_trace(spec_of(), [3, 4, 5], seed=0), tmp_path / "t")
    with pytest.raises(TraceContentError, match="sequences is"):
        fr.load(path, sequences=sequences)


@pytest.mark.parametrize("codec", CODECS)
def test_a_part_is_verified_and_the_rest_is_not_read(tmp_path, codec, monkeypatch):
    monkeypatch.setattr("foreroute.trace.file.writing.LEAST_ROWS", 8)
    monkeypatch.setattr("foreroute.trace.file.writing.ROWS_PER_EXPERT", 0)
    trace = fr.trace.synthetic_trace(spec_of(), [9, 9, 9], seed=1)
    path = fr.save(trace, tmp_path / "t", codec=codec)
    raw, words = bytearray(path.read_bytes()), load_file(path)["payload_words"].astype(int)
    header_size = struct.unpack("<Q", raw[:8])[0]
    begin = 8 + header_size + json.loads(raw[8 : 8 + header_size])["payloads"]["data_offsets"][0]
    raw[begin + 8 * int(words[0].sum() + words[1, 0]) + 3] ^= 1  # sequence 1, layer 1
    path.write_bytes(raw)
    expected = as_read(trace, codec)
    assert fr.load(path, sequences=[0, 2]).equals(expected.select([0, 2]))
    layers = [trace.spec.layers[2], trace.spec.layers[0]]
    assert fr.load(path, layers=layers).equals(expected.select_layers(layers))
    with pytest.raises(TraceFileError, match="payload of block 1 is not what was written"):
        fr.load(path, sequences=[1])


@pytest.mark.parametrize("codec", CODECS)
def test_routes_are_bound_to_tokens_and_versions(tmp_path, codec):
    trace = random_trace(0)
    path = fr.save(trace, tmp_path / "t", codec=codec)
    tokens, versions = load_file(path)["token_ids"] + 1, load_file(path)["span_versions"] + 1
    for tensors, message in [({"token_ids": tokens}, "tokens of block 0"), ({"span_versions": versions}, "its digest")]:
        with pytest.raises(TraceFileError, match=message):
            fr.load(rewritten(tmp_path, tensors=tensors, codec=codec))


def test_saving_never_replaces_unless_told(tmp_path):
    path = fr.save(random_trace(0), tmp_path / "t")
    before = path.read_bytes()
    with pytest.raises(TraceFileError, match="already exists"):
        fr.save(random_trace(1), path)
    assert path.read_bytes() == before
    fr.save(random_trace(1), path, overwrite=True)
    assert fr.load(path).equals(random_trace(1))
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = fr.save(random_trace(0), tmp_path / "t")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(TraceFileError, match=r"cannot be written \(File too large\)"):
            fr.save(random_trace(1), path, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert fr.load(path).equals(random_trace(0))
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_what_the_system_refuses_is_one_error_that_says_what_it_was(tmp_path):
    trace, path = random_trace(0), fr.save(random_trace(0), tmp_path / "t")
    with pytest.raises(TraceFileError, match=r"t/below cannot be written \(Not a directory\)"):
        fr.save(trace, path / "below")
    with pytest.raises(TraceFileError, match="File name too long"):
        fr.save(trace, tmp_path / ("x" * 300))
    for special in (tmp_path, tmp_path / "fifo"):
        if special.name == "fifo":
            os.mkfifo(special)
        with pytest.raises(TraceFileError, match=r"no regular file|already exists"):
            fr.save(trace, special, overwrite=special.name == "fifo")
        with pytest.raises(TraceFileError, match="expected a file"):
            fr.load(special)
    assert fr.load(path).equals(trace)


CUTTER = """
import os, sys
import foreroute as fr
from foreroute.trace.file import reading
sealed = reading.seal_arrays

def cut_meanwhile(*rows):
    os.truncate(sys.argv[1], 4096)
    return sealed(*rows)

reading.seal_arrays = cut_meanwhile
try:
    fr.load(sys.argv[1])
except fr.errors.TraceFileError as error:
    print(error)
"""


def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_no_signal(tmp_path):
    path = fr.save(fr.trace.synthetic_trace(spec_of(), [2000] * 4, seed=0), tmp_path / "t")
    command = [sys.executable, "-c", CUTTER, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "was cut while it was read" in done.stdout


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


def rewritten(tmp_path, *, header=(), tensors=(), codec="packed"):
    path = fr.save(random_trace(0), tmp_path / "good", codec=codec, overwrite=True)
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
    with pytest.raises(TraceFileError, match="not a whole safetensors file"):
        fr.load(tmp_path / "text")
