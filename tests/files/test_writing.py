import fcntl
import os
import stat
import subprocess
import sys

import pytest

from foreroute.errors import InputError
from foreroute.files import write_atomically, write_folder_atomically, writing_named


def left_behind(target):
    """A process is killed in the middle of a write to `target`."""
    code = """
import os, signal, sys
from pathlib import Path
from foreroute.files import write_atomically

def die(file):
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

write_atomically(Path(sys.argv[1]), die)
"""
    assert subprocess.run([sys.executable, "-c", code, str(target)]).returncode == -9


@pytest.mark.parametrize("content", [b"new", "new", lambda file: file.write(b"new")])
def test_a_file_is_replaced_whole(tmp_path, content):
    target = tmp_path / "a" / "t"
    write_atomically(target, b"old")
    write_atomically(target, content)
    assert target.read_bytes() == b"new"
    assert [p.name for p in target.parent.iterdir()] == ["t"]
    with pytest.raises(FileExistsError):
        write_atomically(target, b"newer", overwrite=False)
    assert target.read_bytes() == b"new"


def test_a_failed_write_leaves_what_was_there_and_nothing_else(tmp_path):
    target = tmp_path / "t"
    write_atomically(target, b"old")

    def fail(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, fail)
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_what_a_killed_writer_left_is_removed_by_the_next_write_to_the_same_target(tmp_path):
    target = tmp_path / "t"
    left_behind(target)
    left_behind(tmp_path / "other")
    (tmp_path / ".t.backup").write_bytes(b"mine")
    assert len([p for p in tmp_path.iterdir() if p.name.startswith(".t.")]) == 2
    write_atomically(target, b"new")
    assert sorted(p.name[:7] for p in tmp_path.iterdir()) == [".other.", ".t.back", "t"]


def test_a_writer_at_work_keeps_its_temporary_file(tmp_path):
    target = tmp_path / "t"

    def write_meanwhile(file):
        file.write(b"first")
        write_atomically(target, b"second")

    write_atomically(target, write_meanwhile)
    assert target.read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_folders_fifos_and_devices_are_never_replaced(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "folder").mkdir()
    for target in (fifo, tmp_path / "folder", tmp_path.__class__("/dev/full")):
        before = os.stat(target).st_mode
        with pytest.raises(InputError, match="nothing was changed"), writing_named(target, InputError):
            write_atomically(target, b"new")
        assert stat.S_IFMT(os.stat(target).st_mode) == stat.S_IFMT(before)


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


@pytest.mark.parametrize("target", ["file/below", "x" * 300, "/proc/x"])
def test_what_the_system_refuses_is_one_error(tmp_path, target):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(InputError, match="cannot be written"), writing_named(target, InputError):
        write_atomically(tmp_path / target, b"new")
    assert (tmp_path / "file").read_bytes() == b"mine"


FOLDER = {"config.json": "{}", "figures.json": "[1]"}


def folder_left_behind(target):
    """A process is killed when half of a folder is written."""
    code = """
import os, signal, sys
from pathlib import Path
from foreroute.files import write_folder_atomically

class Contents(dict):
    def items(self):
        yield "config.json", "{}"
        os.kill(os.getpid(), signal.SIGKILL)

write_folder_atomically(Path(sys.argv[1]), Contents({"config.json": "{}", "figures.json": "[1]"}))
"""
    assert subprocess.run([sys.executable, "-c", code, str(target)]).returncode == -9
    (left,) = [path for path in target.parent.iterdir() if path.name.startswith(f".{target.name}.")]
    return left


def test_a_folder_is_written_whole_where_none_or_an_empty_one_is(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    for target in (tmp_path / "a" / "new", tmp_path / "empty"):
        write_folder_atomically(target, FOLDER)
        assert {path.name: path.read_text() for path in target.iterdir()} == FOLDER
    with pytest.raises(OSError, match="not empty"):
        write_folder_atomically(tmp_path / "link", {"config.json": "other"})
    with pytest.raises(FileNotFoundError):
        write_folder_atomically(tmp_path / "new", {"config.json": "{}", "/no/such/folder": ""})
    assert {path.name: path.read_text() for path in (tmp_path / "empty").iterdir()} == FOLDER
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "empty", "link"]


def test_a_folder_that_a_killed_writer_left_is_removed_and_nothing_else(tmp_path):
    target = tmp_path / "t"
    left = folder_left_behind(target)
    kept = {f".t.{n:08x}": tmp_path / f".t.{n:08x}" for n in range(4)}
    for path in kept.values():
        path.mkdir()
    (tmp_path / ".t.00000000" / "mine").write_text("not of these names")
    (tmp_path / ".t.00000001" / "config.json").mkdir()
    (tmp_path / ".t.00000002" / "config.json").symlink_to(target)
    held = os.open(tmp_path / ".t.00000003", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    (tmp_path / ".t.backup").mkdir()
    (tmp_path / ".other.00000000").mkdir()
    (tmp_path / ".t.0000000a").symlink_to(".t.backup")
    write_folder_atomically(target, FOLDER)
    os.close(held)
    assert not left.exists()
    names = [".other.00000000", *kept, ".t.0000000a", ".t.backup", "t"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
