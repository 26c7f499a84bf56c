"""Where files lie: at a path, or at a URL of any store that fsspec knows (https://filesystem-spec.readthedocs.io).

A URL has "://" in it; one of `file://` is a path. From either place bytes are read by ranges. At a URL a file is
written under another name and moved. A store must show what was moved there whole or not at all, and list it from then
on: local and network file systems do, and so do S3, Google's and Azure's object stores.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from foreroute.errors import ForerouteError, InputError, how_to_install
from foreroute.files.regular import open_regular, reason

AHEAD_BYTES, MOST_BYTES = 1 << 14, 1 << 23
"""Asked for at once at least, where little is read, one after another: the header and the small tensors of most files.
And at most: what is asked for is copied once."""


def as_place(place: str | os.PathLike[str]) -> Path | str:
    """A path, or the URL that this is."""
    if isinstance(place, str) and "://" in place and not place.startswith("file://"):
        return place
    return Path(place.removeprefix("file://") if isinstance(place, str) else place)


def within(folder: str | os.PathLike[str], name: str) -> Path | str:
    """The place of a file in a folder."""
    place = as_place(folder)
    return place / name if isinstance(place, Path) else f"{place.rstrip('/')}/{name}"


class RangedFile:
    """A file that is read by ranges of bytes, and no others. Few that follow those before are read with some behind.

    Args:
        fetch: the bytes from one to another, which are there.
        size: of the file, bytes.
        close: lets go of it.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, close: Callable[[], object]) -> None:
        self._fetch, self._size, self.close = fetch, size, close
        self._place = self._begin = 0
        self._read = memoryview(b"")

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a byte, from the beginning or from the end of the file."""
        self._place = offset + (self._size if whence == os.SEEK_END else 0)
        return self._place

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer with what follows, or a part of it; return its bytes."""
        start, end = self._place, self._begin + len(self._read)
        stop = min(self._size, start + len(buffer), start + MOST_BYTES)
        if start >= stop:
            return 0
        if not self._begin <= start < end:
            ahead = min(self._size, start + AHEAD_BYTES) if start == end else 0
            self._begin, self._read = start, memoryview(self._fetch(start, max(stop, ahead)))
        part = self._read[start - self._begin : stop - self._begin]
        buffer[: len(part)] = part
        self._place += len(part)
        return len(part)


def open_ranged(place: str | os.PathLike[str], kind: type[InputError]) -> RangedFile:
    """Open a file to be read by ranges of bytes.

    Raises:
        kind: when it is missing, or cannot be opened; of a path also when it is no regular file.
    """
    place = as_place(place)
    if isinstance(place, Path):
        file = open_regular(place, kind)
        descriptor = file.fileno()
        return RangedFile(
            lambda start, stop: os.pread(descriptor, stop - start, start), os.fstat(descriptor).st_size, file.close
        )
    with _asking(place, "read", kind):
        store, path = _store_of(place, kind)
        size = int(store.info(path)["size"])

    def fetch(start: int, stop: int) -> bytes:
        with _asking(place, "read", kind):
            content: bytes = store.cat_file(path, start=start, end=stop)
        return content

    return RangedFile(fetch, size, lambda: None)


def write_at(url: str, content: Callable[[IO[bytes]], None], kind: type[InputError], *, overwrite: bool) -> None:
    """Fill a file at a URL under another name, `.<name>.<random>`, and move it: that of a killed writer stays.

    Raises:
        kind: when there is a file and `overwrite` is False, or it cannot be written: what was there is whole. Of two
            writers at a time that may not replace a file, a store may let both write; it is then that of one of them.
    """
    with _asking(url, "written", kind):
        store, path = _store_of(url, kind)
        folder, _, name = path.rpartition("/")
        temporary = f"{folder}/.{name}.{secrets.token_hex(4)}"
        if not overwrite and store.exists(path):
            raise kind(f"{url} already exists; pass another path, or overwrite=True to replace it")
        store.makedirs(folder, exist_ok=True)
        try:
            with store.open(temporary, "wb") as file:
                content(file)
            store.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                store.rm_file(temporary)
            raise


def names_in(folder: str | os.PathLike[str], kind: type[InputError]) -> list[str]:
    """The names of all that lies in a folder, as it is now; none when there is no such folder.

    Raises:
        kind: when it cannot be looked into.
    """
    folder = as_place(folder)
    if isinstance(folder, Path):
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise kind(f"{folder} cannot be looked into ({reason(error)})") from error
    with _asking(folder, "looked into", kind):
        store, path = _store_of(folder, kind)
        store.invalidate_cache(path)
        try:
            return [entry.rstrip("/").rpartition("/")[2] for entry in store.ls(path, detail=False)]
        except FileNotFoundError:
            return []


def _store_of(url: str, kind: type[InputError]) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # an engine's worker has numpy alone
    except ImportError as error:
        raise kind(f"{url} needs fsspec, which is not installed; {how_to_install('engines')}") from error
    store, path = url_to_fs(url)
    return store, path


@contextmanager
def _asking(url: str, doing: str, kind: type[InputError]) -> Iterator[None]:
    """What a store refuses, in whatever error of its library, becomes one of `kind` that names the URL."""
    try:
        yield
    except ForerouteError:
        raise
    except FileNotFoundError as error:
        raise kind(f"{url} does not exist") from error
    except Exception as error:
        raise kind(f"{url} cannot be {doing} ({type(error).__name__}: {error!s:.200})") from error
