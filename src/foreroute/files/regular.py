"""Opens and reads what others wrote. Every failure is the error that the caller names, with the path.

A file is never mapped into memory: a mapped file that another process cuts ends this one with SIGBUS, which cannot be
caught. A FIFO, a device or a socket is never opened for reading: it would wait, or go on, for ever.
"""

from __future__ import annotations

import json
import os
import re
import stat
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from foreroute.errors import ForerouteError, InputError, shown

MOST_BYTES = 4 << 30
"""Bytes that are read in one piece at most, unless the caller says otherwise; larger inputs are mistakes."""
HEAD_BYTES = 4096
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
UNPACK = "Unpack it first"
WITH_NUMPY = "numpy.load(path) opens it: hand in its arrays"
WITH_TORCH = "torch.load(path, weights_only=True) opens it: hand in its arrays"
ZIPPED = rb"PK\x03\x04.{26}[\w ./-]*"
LINE = rb"(\xef\xbb\xbf)?(\s|#[^\n]*\n)*"
FILE_TYPES = {
    rb"\Z": "empty. Was it written to the end? Make it again",
    rb".{4}\0{4}\{": "a safetensors file",
    rb"\x93NUMPY": f"an array of numpy (.npy). {WITH_NUMPY}, or write counts by foreroute.plan.save_counts",
    ZIPPED + rb"/(data\.pkl|\.format_version|byteorder|version)": f"a file of torch.save (.pt), a zip. {WITH_TORCH}",
    ZIPPED + rb"\.npy": f"a zip of arrays of numpy (.npz). {WITH_NUMPY}",
    rb"PK\x03\x04": f"a zip archive. {UNPACK}",
    rb"\x80[\x02-\x05]": f"a pickle. If torch.save (.pt) wrote it, {WITH_TORCH}; else write its arrays by numpy.save",
    rb"\x1f\x8b": f"compressed by gzip (.gz). {UNPACK}",
    rb"\x28\xb5\x2f\xfd": f"compressed by zstd (.zst). {UNPACK}",
    rb"BZh": f"compressed by bzip2 (.bz2). {UNPACK}",
    rb"\xfd7zXZ\0": f"compressed by xz (.xz). {UNPACK}",
    rb".{257}ustar": f"a tar archive. {UNPACK}",
    rb"PAR1": "a Parquet file. Read it with pandas or pyarrow, and hand in its columns",
    rb"ARROW1": "an Arrow file. Read it with pyarrow, and hand in its columns",
    rb"\x89HDF\r\n": "an HDF5 file. Read it with h5py, and hand in its arrays",
    rb"version https://git-lfs": "a pointer of Git LFS, and not the file itself. git lfs pull fetches it",
    rb"\xff\xfe|\xfe\xff": "text in UTF-16. Save it as UTF-8",
    rb".*[\0-\x08\x0e-\x1f]": "",  # binary, of a kind that nobody knows
    LINE + rb"<(?i:!doctype|html)": "a page in HTML. It may tell what went wrong when it was fetched",
    LINE + rb"(\[{1,2}[A-Za-z_][\w.-]*\]{1,2}\s|[A-Za-z_][\w.-]*[ \t]*=)": "TOML",
    LINE + rb"[{\[][^\n]*[}\]]\r?\n[{\[]": "JSON Lines (.jsonl). Hand in one of its values, or a JSON list of them",
    LINE + rb"data: *[{\[]": "a stream of events. Ask the server without `stream`",
    LINE + rb"[{\[]": "JSON",
    rb"": "text",
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
        raise error(f"{path} does not exist" + " in the working folder" * (not path.is_absolute())) from cause
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
            raise error(f"{path} has {size} bytes; expected {most_bytes} at most{it_is(file.read(HEAD_BYTES), 'text')}")
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
        content = text[:HEAD_BYTES].encode(errors="replace") if isinstance(text, str) else text
        raise error(f"{name} is not JSON ({cause}){it_is(content, 'JSON', 'text')}") from cause
    except RecursionError as cause:  # deeper than the interpreter's stack
        raise error(f"{name} is not JSON that can be read: it is nested too deep") from cause


def _decoded(content: bytes | bytearray, error: type[ForerouteError], name: str) -> str:
    """Return bytes as text in UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as cause:
        why = f"{cause.reason} at byte {cause.start}"
        raise error(f"{name} is not text in UTF-8 ({why}){it_is(content, 'JSON', 'text')}") from cause


def it_is(content: bytes | bytearray | memoryview, *expected: str) -> str:
    """End a sentence with the kind of file that begins so, and what to do; empty for what was expected."""
    head = bytes(content[:HEAD_BYTES])
    found = next(words for begin, words in FILE_TYPES.items() if re.match(begin, head, re.DOTALL))
    return f": it is {found}" if found and found not in expected else ""


def reason(cause: Exception) -> str:
    """Say why the system does not open or read a file."""
    return getattr(cause, "strerror", None) or str(cause)
