"""What follows from the declaration of a format: reading, refusing and writing, the same for every kind of file."""

import os
from io import BytesIO

import numpy as np
import pytest

from foreroute.errors import PlanError
from foreroute.files.container import FileFormat, TensorSchema, checksum, tensors_to_bytes

FORMAT = FileFormat(
    name="song",
    version=4,
    error=PlanError,
    metadata=("title",),
    tensors={"pitch_NV": TensorSchema("U8 U16", "NV"), "length_N": TensorSchema("F32", "N")},
    made_by="somebody sings songs",
    apart=("length_N",),
)
METADATA = {"title": "Ü\n"}
TENSORS = {"pitch_NV": np.arange(6, dtype=np.uint8).reshape(3, 2), "length_N": np.ones(3, np.float32)}


def forged(metadata=(), tensors=(), without=()):
    """A file with a right checksum, whatever it holds; a source in memory."""
    held = {"foreroute.song": "4", "foreroute.title": "x", **dict(metadata)}
    held = {key: value for key, value in held.items() if key not in without}
    there = {name: tensor for name, tensor in {**TENSORS, **dict(tensors)}.items() if name not in without}
    ours = {key: value for key, value in held.items() if key.startswith("foreroute.")}
    covered = {name: tensor for name, tensor in there.items() if name != "length_N"}
    return BytesIO(tensors_to_bytes({**held, "foreroute.checksum": checksum(ours, covered)}, there))


@pytest.mark.parametrize("in_memory", [True, False])
def test_what_is_written_is_read(tmp_path, in_memory):
    path = FORMAT.write(tmp_path / "deep" / "song", METADATA, TENSORS, overwrite=False)
    content = FORMAT.to_bytes(METADATA, TENSORS)
    assert path.read_bytes() == content
    metadata, tensors = FORMAT.read(BytesIO(content) if in_memory else path)
    assert metadata == METADATA
    assert list(tensors) == ["pitch_NV"]  # the other one stands apart
    assert tensors["pitch_NV"].tobytes() == TENSORS["pitch_NV"].tobytes()
    assert FORMAT.is_in(path)
    assert not FORMAT.is_in(tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            forged(without=["foreroute.song"]),
            r"opened file is no song file: its metadata lack foreroute\.song\. somebody",
        ),
        (forged({"foreroute.song": "3"}), "opened file is a song file of version 3; this foreroute reads version 4"),
        (forged({"foreroute.more": ""}), r"its metadata are .*foreroute\.more.*; expected"),
        (forged(without=["length_N"]), "its tensors are pitch_NV; expected length_N, pitch_NV"),
        (forged(tensors={"pitch_NV": np.zeros((3, 2))}), "tensor pitch_NV is float64; expected U8 or U16"),
        (forged(tensors={"pitch_NV": np.zeros(3, np.uint8)}), r"pitch_NV has the shape \[3\]; expected \[N, V\]"),
        (forged(tensors={"length_N": np.zeros(2, np.float32)}), "length_N has 2 along N, and pitch_NV has 3"),
    ],
)
def test_what_is_not_as_declared_is_refused_by_name(source, message):
    with pytest.raises(PlanError, match=message):
        FORMAT.read(source)


def test_what_breaks_the_declaration_is_not_written(tmp_path):
    for tensors in ({**TENSORS, "more": np.zeros(1)}, {**TENSORS, "length_N": np.ones(2, np.float32)}):
        with pytest.raises(PlanError, match=r"song.*written"):
            FORMAT.write(tmp_path / "song", METADATA, tensors, overwrite=True)
    assert not os.listdir(tmp_path)
