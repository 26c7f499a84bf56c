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

import numpy as np
from numpy.typing import NDArray

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
    """A file that is read by ranges of bytes. Few that follow those before are read with some that are behind.

    Args:
        name: of the file, for messages.
        size: its bytes.
        fetch: the bytes from one place to another, or fewer when they are not there any more.
        close: lets go of the file.
    """

    def __init__(
        self, name: str, size: int, fetch: Callable[[int, int], Any], close: Callable[[], None] = lambda: None
    ) -> None:
        self.name, self.size, self.close, self._fetch = name, size, close, fetch
        self._begin, self._held = 0, memoryview(b"")

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes from `start` to `stop`, or fewer when they are not there any more. The array is the caller's."""
        content, place = np.empty(stop - start, np.uint8), start
        while place < stop:
            end = self._begin + len(self._held)
            if not self._begin <= place < end:
                most, ahead = min(stop, place + MOST_BYTES), place + AHEAD_BYTES if place == end else 0
                self._begin, self._held = place, memoryview(self._fetch(place, max(most, min(ahead, self.size))))
                if not self._held:
                    break
            part = self._held[place - self._begin :][: stop - place]
            content[place - start :][: len(part)] = part
            place += len(part)
        return content[: place - start]


def open_ranged(place: str | os.PathLike[str], kind: type[InputError]) -> RangedFile:
    """Open a file to be read by ranges of bytes.

    Raises:
        kind: when it is missing, or cannot be opened; of a path also when it is no regular file.
    """
    where = as_place(place)
    if isinstance(where, Path):
        file = open_regular(where, kind)
        number = file.fileno()
        size = os.fstat(number).st_size
        return RangedFile(str(place), size, lambda start, stop: os.pread(number, stop - start, start), file.close)
    with _asking(where, "read", kind):
        store, path = _store_of(where, kind)
        size = int(store.info(path)["size"])

    def fetch(start: int, stop: int) -> Any:
        with _asking(where, "read", kind):
            return store.cat_file(path, start=start, end=stop)

    return RangedFile(where, size, fetch)


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
        from fsspec.core import url_to_fs  # an engine's worker has numpy alone
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
