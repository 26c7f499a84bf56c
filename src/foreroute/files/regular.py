"""Opening and reading what others wrote. Every failure is one error of the caller's kind that names the path.

A file is never mapped into memory: a mapped file that another process cuts ends this one with SIGBUS, which cannot be
caught. A FIFO, a device or a socket is never opened for reading: it would wait, or go on, for ever.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, Protocol

from foreroute.errors import ForerouteError, InputError

MOST_BYTES = 4 << 30
"""Bytes that are read in one piece at most, unless the caller says otherwise; larger inputs are mistakes."""

NO_FILE = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class ByteSource(Protocol):
    """Whatever holds a known number of bytes and gives any range of them: a file, a buffer, a URL.

    Attributes:
        name: what messages call it.
        size: its bytes.
    """

    name: str
    size: int

    def read(self, start: int, size: int) -> bytes | bytearray:
        """Exactly `size` bytes from `start`, or an error of the source's own."""
        ...


class HeldBytes:
    """Bytes in memory, as a `ByteSource`."""

    def __init__(self, content: bytes, name: str) -> None:
        self.name, self.size, self._content = name, len(content), content

    def read(self, start: int, size: int) -> bytes:
        """Those from `start`."""
        return self._content[start : start + size]


class RegularFile:
    """An opened file that is known to be one, read by position. A `ByteSource`.

    Args:
        path: the file.
        kind: the error to raise.

    Attributes:
        name: the path as text.
        size: bytes when it was opened.

    Raises:
        kind: when it is missing, cannot be opened, or is a folder, FIFO, device or socket.
    """

    def __init__(self, path: str | os.PathLike[str], kind: type[InputError]) -> None:
        self.name, self._kind = str(Path(path)), kind
        try:
            # O_NONBLOCK: to open a FIFO would otherwise wait for a writer
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise kind(f"{self.name} does not exist") from error
        except (OSError, ValueError) as error:  # a ValueError for a path that is no name
            raise kind(f"{self.name} cannot be opened ({_reason(error)})") from error
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise kind(f"{self.name} is {NO_FILE.get(stat.S_IFMT(status.st_mode), 'no regular file')}; expected a file")
        self.size = status.st_size

    def read(self, start: int, size: int) -> bytearray:
        """Exactly `size` bytes from `start`.

        Raises:
            kind: when they cannot be read, or the file has become shorter since it was opened.
        """
        if start < 0 or size < 0 or start + size > self.size:
            raise self._kind(f"{self.name} has {self.size} bytes; {size} from byte {start} on are not among them")
        buffer, done = bytearray(size), 0
        view = memoryview(buffer)
        try:
            while done < size:
                count = os.preadv(self._descriptor, [view[done:]], start + done)
                if count == 0:
                    raise self._kind(f"{self.name} was cut while it was read; copy it again")
                done += count
        except OSError as error:
            raise self._kind(f"{self.name} cannot be read ({_reason(error)})") from error
        return buffer

    def close(self) -> None:
        """Let go of it; harmless when done twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> RegularFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_file(path: str | os.PathLike[str], kind: type[InputError], *, most_bytes: int = MOST_BYTES) -> bytes:
    """All bytes of a file.

    Raises:
        kind: as `RegularFile` does, and when the file has more than `most_bytes`.
    """
    with RegularFile(path, kind) as file:
        if file.size > most_bytes:
            raise kind(f"{file.name} has {file.size} bytes; expected {most_bytes} at most")
        return bytes(file.read(0, file.size))


def read_text(path: str | os.PathLike[str], kind: type[InputError], *, most_bytes: int = MOST_BYTES) -> str:
    """All text of a UTF-8 file.

    Raises:
        kind: as `read_file` does, and when the bytes are not UTF-8.
    """
    return _decoded(read_file(path, kind, most_bytes=most_bytes), kind, str(path))


def parse_json(text: str | bytes | bytearray, kind: type[ForerouteError], *, name: str) -> Any:
    """The value of a JSON text from outside.

    Args:
        text: UTF-8 when it is bytes.
        kind: the error to raise.
        name: of the text, such as its path, for the message.

    Raises:
        kind: when it is no JSON, nested deeper than the interpreter's stack, or has an integer of
            thousands of digits.
    """
    try:
        return json.loads(text if isinstance(text, str) else _decoded(text, kind, name))
    except ForerouteError:
        raise
    except ValueError as error:
        raise kind(f"{name} is not JSON ({error})") from error
    except RecursionError as error:
        raise kind(f"{name} is not JSON that can be read: it is nested too deep") from error


def is_text(value: object) -> bool:
    """Whether it is a string that can be written as UTF-8: JSON can name halves of characters, which cannot."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decoded(content: bytes | bytearray, kind: type[ForerouteError], name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise kind(f"{name} is not text in UTF-8 ({error.reason} at byte {error.start})") from error


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
