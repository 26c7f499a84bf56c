"""The container: what the safetensors library reads and writes, and what follows from the declaration of a format."""

import json
import os
from hashlib import blake2b
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from safetensors import SafetensorError
from safetensors.numpy import load, save

from foreroute.errors import InputError, PlanError
from foreroute.files.container import DTYPES, FileFormat, TensorFile, TensorSchema, checksum, tensors_to_bytes

TENSORS = {"a": np.arange(12, dtype=np.int32).reshape(6, 2), "b": np.arange(5, dtype=np.float64), "c": np.ones(3, "u1")}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SHAPES = array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
SOME_TENSORS = st.dictionaries(
    TEXTS.filter(lambda name: name != "__metadata__"),
    st.sampled_from(list(DTYPES.values())).flatmap(lambda dtype: arrays(dtype, SHAPES)),
    max_size=4,
)


class Held(BytesIO):
    """A file in memory that notes what is read of it."""

    def __init__(self, content):
        super().__init__(content)
        self.asked = []

    def readinto(self, buffer):
        self.asked.append((self.tell(), len(buffer)))
        return super().readinto(buffer)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].tobytes() == tensor.tobytes()
    return True


def read(content):
    with TensorFile(Held(content), InputError) as file:
        return file.metadata, {name: file.read(name) for name in file.tensors}


@settings(max_examples=60)
@given(SOME_TENSORS, st.dictionaries(TEXTS, TEXTS, max_size=3))
def test_what_is_written_is_read_here_and_by_the_library(tensors, metadata):
    content = tensors_to_bytes(metadata, tensors)
    assert content == tensors_to_bytes(dict(reversed(metadata.items())), dict(reversed(tensors.items())))
    assert same(load(content), tensors)
    found_metadata, found = read(content)
    assert found_metadata == metadata
    assert same(found, tensors)
    assert same(read(save(tensors, metadata=metadata or None))[1], tensors)
    with TensorFile(Held(content), InputError) as file:  # so that it can be mapped, whatever the text before
        assert all(stored.start % stored.dtype.itemsize == 0 for stored in file.tensors.values())


@pytest.mark.parametrize("as_source", [True, False])
def test_a_part_of_a_tensor_is_read_and_nothing_else(tmp_path, as_source):
    content = tensors_to_bytes({"who": "me"}, TENSORS)
    (tmp_path / "t").write_bytes(content)
    source = Held(content) if as_source else tmp_path / "t"
    with TensorFile(source, InputError) as file:
        header = 8 + int.from_bytes(content[:8], "little")
        part = file.read("a", 2, 5)
        np.testing.assert_array_equal(part, TENSORS["a"][2:5])
        part += 1  # the array is the caller's own
        np.testing.assert_array_equal(file.read("a"), TENSORS["a"])
        if as_source:
            begin = header + TENSORS["b"].nbytes
            assert source.asked == [(0, 9), (9, header - 9), (begin + 16, 24), (begin, 48)]
        for start, stop in ((3, 7), (-1, 2), (4, 3)):
            with pytest.raises(InputError, match=r"among.*6"):
                file.read("a", start, stop)


def test_what_the_container_does_not_hold_is_refused():
    """Headers that are no text or too long, other types, and truth values that are not 0 or 1."""
    halves = {"__metadata__": {"a": "\ud800"}}, {"__metadata__": {"\ud800": "a"}}, {"\ud800": {}}
    for header in (*halves, {"__metadata__": {"a": 1}}, {"__metadata__": ["a"]}, ["a"]):
        text = json.dumps(header).encode()
        with pytest.raises(InputError, match=r"text|strings|no.*safetensors"):
            TensorFile(Held(len(text).to_bytes(8, "little") + text), InputError)
    with pytest.raises(InputError, match=r"a header of \d+ bytes; expected 100 at most"):
        TensorFile(Held(tensors_to_bytes({"who": "x" * 100}, {})), InputError, most_header_bytes=100)
    with pytest.raises(InputError, match=r"tensor.*complex128"):
        tensors_to_bytes({}, {"z": np.zeros(2, np.complex128)})
    content = tensors_to_bytes({}, {"a": np.array([False, True])})
    assert read(content)[1]["a"].tolist() == [False, True]
    with pytest.raises(InputError, match="truth values"):
        read(content[:-1] + b"\2")


def test_the_header_is_refused_wherever_the_library_refuses_it(tmp_path):
    """Every changed header byte: what the library refuses is refused here; what both take is read alike."""
    raw, accepted = save(TENSORS), 0
    for place in range(8 + int.from_bytes(raw[:8], "little")):
        for byte in (0, raw[place] ^ 1, raw[place] ^ 64, ord("9"), ord('"')):
            changed = raw[:place] + bytes([byte]) + raw[place + 1 :]
            try:
                expected = load(changed)
            except (SafetensorError, KeyError):
                expected = None
            try:
                seen = read(changed)[1]
            except InputError:
                continue
            assert expected is not None, (place, byte)
            assert {name: each.tobytes() for name, each in seen.items()} == {
                k: v.tobytes() for k, v in expected.items()
            }
            accepted += 1
    assert accepted


def test_the_checksum_is_what_its_page_says():
    """Written from docs/formats.md."""
    metadata = {"b": "ü", "a": ""}
    tensors = {"y": np.array([[1, 2, 3]], ">u2"), "x": np.zeros((0, 2), np.float32)}
    fields = [b"2", b"a", b"", b"b", "ü".encode(), b"x", b"F32", b"0x2", b"", b"y", b"U16", b"1x3", b"\1\0\2\0\3\0"]
    hashed = b"".join(str(len(field)).encode() + b":" + field for field in fields)
    assert checksum(metadata, tensors) == blake2b(hashed, digest_size=16).hexdigest()


FORMAT = FileFormat(
    name="song",
    version=4,
    error=PlanError,
    metadata=("title",),
    tensors={"pitch_NV": TensorSchema("U8 U16", "NV"), "length_N": TensorSchema("F32", "N")},
    made_by="somebody sings songs",
    apart=("length_N",),
)
TITLE = {"title": "Ü\n"}
SONG = {"pitch_NV": np.arange(6, dtype=np.uint8).reshape(3, 2), "length_N": np.ones(3, np.float32)}


def forged(metadata=(), tensors=(), without=()):
    """A file with a right checksum, whatever it holds; a source in memory."""
    held = {"foreroute.song": "4", "foreroute.title": "x", **dict(metadata)}
    held = {key: value for key, value in held.items() if key not in without}
    there = {name: tensor for name, tensor in {**SONG, **dict(tensors)}.items() if name not in without}
    ours = {key: value for key, value in held.items() if key.startswith("foreroute.")}
    covered = {name: tensor for name, tensor in there.items() if name != "length_N"}
    return BytesIO(tensors_to_bytes({**held, "foreroute.checksum": checksum(ours, covered)}, there))


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_is_written_is_read(tmp_path, in_memory):
    path = FORMAT.write(tmp_path / "deep" / "song", TITLE, SONG, overwrite=False)
    content = FORMAT.to_bytes(TITLE, SONG)
    assert path.read_bytes() == content
    metadata, tensors = FORMAT.read(BytesIO(content) if in_memory else path)
    assert metadata == TITLE
    assert list(tensors) == ["pitch_NV"]  # the other one stands apart
    assert tensors["pitch_NV"].tobytes() == SONG["pitch_NV"].tobytes()
    assert FORMAT.is_in(path)
    assert not FORMAT.is_in(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (forged(without=["foreroute.song"]), r"no song.*foreroute\.song\. somebody"),
        (forged({"foreroute.song": "3"}), r"song.*version 3; .*version 4"),
        (forged({"foreroute.more": ""}), r"metadata.*foreroute\.more.*; expected"),
        (forged(without=["length_N"]), r"tensors \w+ pitch_NV; expected length_N, pitch_NV"),
        (forged(tensors={"pitch_NV": np.zeros((3, 2))}), "tensor pitch_NV is float64; expected U8 or U16"),
        (forged(tensors={"pitch_NV": np.zeros(3, np.uint8)}), r"pitch_NV.*shape \[3\]; expected \[N, V\]"),
        (forged(tensors={"length_N": np.zeros(2, np.float32)}), "length_N has 2 along N, and pitch_NV has 3"),
    ],
)
def test_what_is_not_as_declared_is_refused_by_name(source, message):
    with pytest.raises(PlanError, match=message):
        FORMAT.read(source)


def test_what_breaks_the_declaration_is_not_written(tmp_path):
    for tensors in ({**SONG, "more": np.zeros(1)}, {**SONG, "length_N": np.ones(2, np.float32)}):
        with pytest.raises(PlanError, match=r"song.*written"):
            FORMAT.write(tmp_path / "song", TITLE, tensors, overwrite=True)
    assert not os.listdir(tmp_path)
