"""The benchmark of flipped bits sees readers that are not careful."""

import zlib

import pytest

from benchmarks.harness.flips import Kind, flipped
from foreroute.errors import InputError, RunFolderError


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content" * 20 + zlib.crc32(b"content" * 20).to_bytes(4, "big"))
    return path


def found(path, read, **kind):
    before = path.read_bytes()
    (each,) = flipped({"kind": Kind(path, read, **kind)}, 50, seed=0).values()
    assert path.read_bytes() == before
    assert each.flips == 50
    return each.refused, each.accepted_wrong, each.tracebacks, each.unnamed


def checked(path, error, message):
    content = path.read_bytes()
    if zlib.crc32(content[:-4]) != int.from_bytes(content[-4:], "big"):
        raise error(message)
    return content


def test_what_readers_make_of_flipped_bits_is_told_apart(path):
    assert found(path, lambda: checked(path, RunFolderError, f"{path} is damaged")) == (50, 0, 0, 0)
    assert found(path, lambda: checked(path, InputError, "something is damaged")) == (50, 0, 0, 50)
    assert found(path, lambda: checked(path, KeyError, f"{path}")) == (0, 0, 50, 0)
    assert found(path, path.read_bytes) == (0, 50, 0, 0)
    assert found(path, path.read_bytes, same=False) == (0, 0, 0, 0)
    refused, wrong, *others = found(path, lambda: path.read_bytes()[:70])
    assert (refused, others) == (0, [0, 0])
    assert 0 < wrong < 50, "what is not read is not wrong"
