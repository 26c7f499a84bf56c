"""Files at paths and URLs: what is asked of whoever has the bytes, and what is said when it has none."""

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from foreroute.errors import TraceFileError
from foreroute.files.places import names_in, open_at, write_at


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
