"""Files are read if they are regular, and written whole or not at all, whoever writes beside."""

import errno
import multiprocessing
import os
import signal
import socket
import stat
from pathlib import Path

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from foreroute.errors import InputError, TraceFileError
from foreroute.files.container import TensorFile, as_location, tensors_to_bytes
from foreroute.files.locations import names_in, open_at, write_at
from foreroute.files.regular import open_regular, parse_json, read_file, read_text
from foreroute.files.writing import write_atomically, writing_named


def at_once(write, number):
    """Processes that begin `write(n)` as nearly at once as may be; their exit codes, None of one that hangs."""
    forked = multiprocessing.get_context("fork")
    barrier = forked.Barrier(number)

    def begin(n):
        barrier.wait(60)
        write(n)

    runs = [forked.Process(target=begin, args=(n,)) for n in range(number)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    codes = [run.exitcode for run in runs]
    for run in runs:
        run.kill()
    return codes


@pytest.mark.parametrize("content", [b"new", "new", lambda file: file.write(b"new")])
def test_a_file_is_replaced_whole(tmp_path, content):
    target = tmp_path / "a" / "t"
    write_atomically(target, b"old")
    (tmp_path / "link").symlink_to(target)
    write_atomically(tmp_path / "link", content)
    assert target.read_bytes() == b"new"
    assert [p.name for p in target.parent.iterdir()] == ["t"]
    with pytest.raises(FileExistsError):
        write_atomically(target, b"newer", overwrite=False)
    assert target.read_bytes() == b"new"


def test_a_failed_write_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "t"
    write_atomically(target, b"old")

    def fail(file):
        file.write(b"half")
        raise KeyboardInterrupt

    def lacks_room(*_):
        raise OSError(errno.ENOSPC, "no room")

    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, fail)
    monkeypatch.setattr(os, "replace", lacks_room)
    with pytest.raises(OSError, match="no room"):
        write_atomically(target, b"new")
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_a_writer_that_is_killed_before_it_renames_leaves_what_was_there(tmp_path):
    target = tmp_path / "t"
    write_atomically(target, b"old")

    def write(_):
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        write_atomically(target, b"whole")

    assert at_once(write, 1) == [-signal.SIGKILL]
    assert target.read_bytes() == b"old"
    write_atomically(target, b"new")
    assert target.read_bytes() == b"new"


def test_several_writers_that_replace_one_file_leave_a_whole_one_and_nothing_else(tmp_path):
    def write(n):
        for _ in range(60):
            write_atomically(tmp_path / "t", f"{n}" * 100_000)
            content = (tmp_path / "t").read_text()
            assert len(content) == 100_000
            assert len(set(content)) == 1

    assert at_once(write, 4) == [0] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_folders_fifos_and_devices_are_never_replaced(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "folder").mkdir()
    for target in (fifo, tmp_path / "folder", tmp_path.__class__("/dev/full")):
        before = os.stat(target).st_mode
        with pytest.raises(InputError, match=r"nothing.*changed"), writing_named(target, InputError):
            write_atomically(target, b"new")
        assert stat.S_IFMT(os.stat(target).st_mode) == stat.S_IFMT(before)


@pytest.mark.parametrize("name", ["file/below", "x" * 300, "/proc/x", "a\0b", "\ud800", "folder\0/t"])
def test_what_can_be_no_file_is_one_error(tmp_path, name):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(InputError, match="written"), writing_named(name, InputError):
        write_atomically(tmp_path / name, b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_place_is_a_path_or_a_url_and_what_fails_at_one_leaves_nothing_and_is_one_error():
    assert as_location("a/b", InputError) == as_location("file://a/b", InputError) == Path("a/b")
    assert as_location("memory://a/b", InputError) == "memory://a/b"

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


def test_what_is_no_file_is_refused_at_once_by_the_callers_error(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    socket.socket(socket.AF_UNIX).bind(str(tmp_path / "socket"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"")
    for path, said in (
        (tmp_path / "folder", "is a folder"),
        (tmp_path / "fifo", "is a FIFO"),
        (tmp_path / "socket", r"socket|cannot.*opened"),
        (Path("/dev/zero"), "is a device"),
        (tmp_path / "loop", r"cannot.*opened"),
        (tmp_path / "dangling", r"not exist"),
        (tmp_path / ("x" * 300), r"cannot.*opened"),
        (tmp_path / "file" / "below", r"cannot.*opened"),
        (Path("a\0b"), r"cannot.*opened"),
        (tmp_path / "missing", r"not exist$"),
        (Path("no such file"), r"not exist.*folder$"),
    ):
        for read in (read_file, read_text, open_regular, TensorFile):
            with pytest.raises(TraceFileError, match=said):
                read(path, TraceFileError)


def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_no_signal(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(tensors_to_bytes({}, {"a": np.zeros(1 << 20, np.uint8)}))
    with TensorFile(path, InputError) as file:
        os.truncate(path, 4096)
        with pytest.raises(InputError, match=r"cut.*read"):
            file.read("a")


def test_text_and_json_that_are_none_are_refused(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"text.*UTF-8"):
        read_text(path, InputError)
    for text in ("[" * 100_000, '{"a":', "1" * 5_000, b"\xff", "[NaN"):
        with pytest.raises(InputError, match="table"):
            parse_json(text, InputError, name="the table")
    assert parse_json(b'{"a": [1]}', InputError, name="it") == {"a": [1]}
