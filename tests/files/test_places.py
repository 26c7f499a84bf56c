"""Files at paths and URLs: what is asked of whoever has the bytes, and what is said when it has none."""

import os

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from foreroute.errors import TraceFileError
from foreroute.files import RangedFile, as_place, names_in, within
from foreroute.files.container import AHEAD_BYTES
from foreroute.files.places import open_at, write_at


@settings(max_examples=100)
@given(
    size=st.integers(0, 3 * AHEAD_BYTES),
    reads=st.lists(st.tuples(st.integers(0, 3 * AHEAD_BYTES), st.integers(0, 2 * AHEAD_BYTES)), max_size=8),
    in_order=st.booleans(),
)
def test_ranges_are_those_of_a_file(size, reads, in_order):
    content, asked = os.urandom(size), []

    def fetch(start, stop):
        assert 0 <= start < stop <= size
        asked.append(stop - start)
        return content[start:stop]

    file, place, wanted = RangedFile("it", size, fetch), 0, 0
    for first, length in reads:
        begin = min(size, place if in_order else first)
        place = min(size, begin + length)
        assert file.read(begin, place).tobytes() == content[begin:place]
        wanted += place - begin
    # what lies behind is read with less than was asked for, and at no other place
    assert sum(asked) <= wanted + AHEAD_BYTES * len(asked)


def test_small_reads_one_after_another_are_one_request_and_others_are_exact():
    asked = []

    def fetch(start, stop):
        asked.append((start, stop))
        return bytes(stop - start)

    file = RangedFile("it", 1 << 30, fetch)
    for i in range(100):
        file.read(i * 100, (i + 1) * 100)
    assert asked == [(0, AHEAD_BYTES)]
    for place, length in ((1 << 20, 10), (1 << 21, 1 << 20)):
        file.read(place, place + length)
        assert asked.pop() == (place, place + length)


def test_a_place_is_a_path_or_a_url(tmp_path):
    assert as_place(f"file://{tmp_path}/a") == as_place(tmp_path / "a") == as_place(f"{tmp_path}/a") == tmp_path / "a"
    assert as_place("s3://bucket/a") == "s3://bucket/a"
    assert within("s3://bucket/a/", "b") == "s3://bucket/a/b"
    assert within(as_place(f"file://{tmp_path}"), "b") == within(tmp_path, "b") == tmp_path / "b"
    assert names_in(tmp_path / "none", TraceFileError) == names_in("memory://none", TraceFileError) == []


def test_a_folder_is_looked_into_anew_each_time(monkeypatch):
    """Stores keep what they listed, and a reader waits for what others write."""
    kept, listed = {}, MemoryFileSystem.ls

    def ls(store, path, detail=True):
        return kept.setdefault(path, listed(store, path, detail=detail))

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda store, path=None: kept.clear())
    for name in "ab":
        write_at(f"memory://anew/{name}", lambda file: file.write(b"it"), TraceFileError, overwrite=False)
        assert names_in("memory://anew", TraceFileError)[-1] == name
    MemoryFileSystem.store.clear()


def test_what_fails_leaves_nothing_and_is_one_error():
    def interrupted(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_at("memory://a/b", interrupted, TraceFileError, overwrite=True)
    assert names_in("memory://a", TraceFileError) == []
    with pytest.raises(TraceFileError, match="memory://a/b does not exist"):
        open_at("memory://a/b", TraceFileError)
    write_at("memory://a/b", lambda file: file.write(b"whole"), TraceFileError, overwrite=False)
    _, fetch = open_at("memory://a/b", TraceFileError)
    MemoryFileSystem.store.clear()
    with pytest.raises(TraceFileError, match="memory://a/b does not exist"):
        fetch(0, 5)
