import os
import socket
from pathlib import Path

import numpy as np
import pytest

from foreroute.errors import InputError, TraceFileError, printable
from foreroute.files.container import TensorFile, tensors_to_bytes
from foreroute.files.regular import open_regular, parse_json, read_file, read_text


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
        (tmp_path / "socket", "socket|cannot be opened"),
        (Path("/dev/zero"), "is a device"),
        (tmp_path / "loop", "cannot be opened"),
        (tmp_path / "dangling", "does not exist"),
        (tmp_path / ("x" * 300), "cannot be opened"),
        (tmp_path / "file" / "below", "cannot be opened"),
        (Path("a\0b"), "cannot be opened"),
        (tmp_path / "missing", "does not exist"),
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


def test_what_a_terminal_would_obey_is_escaped():
    hostile = "a\x1b]0;title\x07b\u202ec\udcff\r\td\n\x9b"
    shown = printable(hostile)
    assert shown == "a\\x1b]0;title\\x07b\\u202ec\\udcff\\r\\td\n\\x9b"
    assert str(InputError(hostile)) == shown
    assert printable("Grüße, 你好 \u2013 ok") == "Grüße, 你好 \u2013 ok"
