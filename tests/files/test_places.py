"""Files at paths and URLs: what is asked of whoever has the bytes, and what is said when it has none."""

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from foreroute.errors import TraceFileError
from foreroute.files.places import names_in, open_at, write_at


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
    with pytest.raises(TraceFileError, match=r"memory.*exist"):
        open_at("memory://a/b", TraceFileError)
    write_at("memory://a/b", lambda file: file.write(b"whole"), TraceFileError, overwrite=False)
    assert open_at("memory://a/b", TraceFileError).read() == b"whole"
    MemoryFileSystem.store.clear()
