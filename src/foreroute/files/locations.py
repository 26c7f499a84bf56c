"""Files at a URL of any store that fsspec knows (https://filesystem-spec.readthedocs.io), and the names in a folder.

A store must show a file that was moved whole or not at all, and list it from then on: network file systems do, and so
do S3, Google's and Azure's object stores.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from foreroute.errors import ForerouteError, InputError, how_to_install
from foreroute.files.regular import BUFFER_BYTES, reason


def within(folder: Path | str, name: str) -> Path | str:
    """Return the path or the URL of a file in a folder."""
    return folder / name if isinstance(folder, Path) else f"{folder.rstrip('/')}/{name}"


def open_at(url: str, error: type[InputError]) -> BinaryIO:
    """Open the file at a URL, whose bytes are read by ranges."""
    with _asking(url, "read", error):
        store, path = _store_of(url, error)
        return cast(BinaryIO, store.open(path, "rb", block_size=BUFFER_BYTES))


def write_at(url: str, content: Callable[[IO[bytes]], None], error: type[InputError], *, overwrite: bool) -> None:
    """Write a file to a URL, the whole file or nothing; of two writers at a time, a store may keep either."""
    with _asking(url, "written", error):
        store, path = _store_of(url, error)
        folder, _, name = path.rpartition("/")
        # that of a killed writer stays: no store has files without a name
        temporary = f"{folder}/.{name}.{secrets.token_hex(4)}"
        if not overwrite and store.exists(path):
            raise error(f"{url} already exists; pass another path, or overwrite=True to replace it")
        store.makedirs(folder, exist_ok=True)
        try:
            with store.open(temporary, "wb") as file:
                content(file)
            store.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                store.rm_file(temporary)
            raise


def names_in(folder: Path | str, error: type[InputError]) -> list[str]:
    """Return the names of all that lies in a folder, as it is now; none when there is no such folder."""
    if isinstance(folder, Path):
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []
        except OSError as cause:
            raise error(f"{folder} cannot be looked into ({reason(cause)})") from cause
    with _asking(folder, "looked into", error):
        store, path = _store_of(folder, error)
        store.invalidate_cache(path)  # other writers may have added files since it was asked
        try:
            return [entry.rstrip("/").rpartition("/")[2] for entry in store.ls(path, detail=False)]
        except FileNotFoundError:
            return []


def _store_of(url: str, error: type[InputError]) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    try:
        from fsspec.core import url_to_fs  # an engine's worker has numpy alone
    except ImportError as cause:
        raise error(f"{url} needs fsspec, which is not installed; {how_to_install('engines')}") from cause
    store, path = url_to_fs(url)
    return store, path


@contextmanager
def _asking(url: str, doing: str, error: type[InputError]) -> Iterator[None]:
    """Turn whatever a store's library raises into one `error` that names the URL."""
    try:
        yield
    except ForerouteError:
        raise
    except FileNotFoundError as cause:
        raise error(f"{url} does not exist") from cause
    except Exception as cause:
        raise error(f"{url} cannot be {doing} ({type(cause).__name__}: {cause!s:.200})") from cause
