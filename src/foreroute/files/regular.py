"""Opens and reads what others wrote. Every failure is the error that the caller names, with the path.

A file is never mapped into memory: a mapped file that another process cuts ends this one with SIGBUS, which cannot be
caught. A FIFO, a device or a socket is never opened for reading: it would wait, or go on, for ever.
"""

from __future__ import annotations

import json
import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from foreroute.errors import ForerouteError, InputError, shown

MOST_BYTES = 4 << 30
"""Bytes that are read in one piece at most, unless the caller says otherwise; larger inputs are mistakes."""
HEAD_BYTES = 32
"""Bytes at the beginning that tell a kind of file."""
BUFFER_BYTES = 1 << 14
"""Read at once at least: the header and the small tensors of most files."""
NO_FILE = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
PICKLE = "a pickle. If torch.save wrote it, torch.load(path, weights_only=True) opens it: hand in its arrays"
KINDS = {
    b"\x93NUMPY": "an array of numpy (.npy). numpy.load(path) opens it: hand in its arrays",
    b"PK\x03\x04": "a zip, as torch.save (.pt) and numpy (.npz) write them. Open it with these: hand in its arrays",
    **{b"\x80" + bytes([version]): PICKLE for version in (2, 3, 4, 5)},
    b"\x1f\x8b": "compressed by gzip (.gz). Unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed by zstd (.zst). Unpack it first",
    b"PAR1": "a Parquet file. Read it with pandas or pyarrow, and hand in its columns",
    b"version https://git-lfs": "a pointer of Git LFS, and not the file itself. git lfs pull fetches it",
    b"\xff\xfe": "text in UTF-16. Save it as UTF-8",
    b"\xfe\xff": "text in UTF-16. Save it as UTF-8",
}
"""Kinds of file that are handed in for others, by how they begin, and what to do."""


def as_path(path: object, error: type[InputError]) -> Path:
    """Return a path, and refuse None, bytes, numbers and whatever else is neither text nor a `pathlib.Path`."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise error(f"a path is {shown(path)}; expected text or a pathlib.Path, the name of a file or a folder")
    return Path(path)


def open_regular(path: str | os.PathLike[str], error: type[InputError]) -> BufferedReader[FileIO]:
    """Open a file, and refuse a folder, FIFO, device or socket."""
    path = as_path(path, error)
    try:
        # O_NONBLOCK: to open a FIFO would otherwise wait for a writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as cause:
        raise error(f"{path} does not exist") from cause
    except (OSError, ValueError) as cause:  # a ValueError for a path that is no name
        raise error(f"{path} cannot be opened ({reason(cause)})") from cause
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        what, within = NO_FILE.get(stat.S_IFMT(mode), "no regular file"), ", such as one in it" * stat.S_ISDIR(mode)
        raise error(f"{path} is {what}; expected a file{within}")
    return BufferedReader(FileIO(descriptor), BUFFER_BYTES)


def read_file(path: str | os.PathLike[str], error: type[InputError], *, most_bytes: int = MOST_BYTES) -> bytes:
    """Return all bytes of a file of `most_bytes` at most."""
    with open_regular(path, error) as file:
        # its size is asked before anything is allocated
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise error(f"{path} has {size} bytes; expected {most_bytes} at most{it_is(file.read(HEAD_BYTES))}")
        try:
            content = file.read(size)
        except OSError as cause:
            raise error(f"{path} cannot be read ({reason(cause)})") from cause
    if len(content) != size:
        raise error(f"{path} was cut while it was read; copy it again")
    return content


def read_text(path: str | os.PathLike[str], error: type[InputError], *, most_bytes: int = MOST_BYTES) -> str:
    """Return all text of a UTF-8 file."""
    return _decoded(read_file(path, error, most_bytes=most_bytes), error, str(path))


def parse_json(text: str | bytes | bytearray, error: type[ForerouteError], *, name: str) -> Any:
    """Return the value of a JSON text from outside; `name` says which, for the message."""
    try:
        return json.loads(text if isinstance(text, str) else _decoded(text, error, name))
    except ForerouteError:
        raise
    except ValueError as cause:
        content = text[:1].encode(errors="replace") if isinstance(text, str) else text
        raise error(f"{name} is not JSON ({cause}){it_is(content)}") from cause
    except RecursionError as cause:  # deeper than the interpreter's stack
        raise error(f"{name} is not JSON that can be read: it is nested too deep") from cause


def _decoded(content: bytes | bytearray, error: type[ForerouteError], name: str) -> str:
    """Return bytes as text in UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as cause:
        why = f"{cause.reason} at byte {cause.start}"
        raise error(f"{name} is not text in UTF-8 ({why}){it_is(content)}") from cause


def it_is(content: bytes | bytearray | memoryview) -> str:
    """End a sentence with the kind of file that begins so, and what to do; empty where nothing tells."""
    head = bytes(content[:HEAD_BYTES])
    if not head:
        return ": it is empty. Was it written to the end? Make it again"
    return next((f": it is {kind}" for begin, kind in KINDS.items() if head.startswith(begin)), "")


def reason(cause: Exception) -> str:
    """Say why the system does not open or read a file."""
    return getattr(cause, "strerror", None) or str(cause)
