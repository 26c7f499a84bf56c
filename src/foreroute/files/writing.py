"""Writes files in whole or not at all, and never in the place of something that is no file."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from foreroute.errors import ForerouteError, InputError
from foreroute.files.regular import as_path


def write_atomically(
    target: Path, content: bytes | str | Callable[[IO[bytes]], None], *, overwrite: bool = True
) -> None:
    """Fill a file, flush it to disk, and name it `target`; folders on the way are made, and links are followed.

    Each of several writers of one target writes all of it, and the last one stays. A killed writer leaves
    `.<name>.<random>`.

    `content` is bytes, text to be written as UTF-8, or a function that writes to an opened file.

    Raises:
        FileExistsError: when `target` is there and may not be replaced; when it is no regular file, always.
        OSError: what the system refuses. `target` is as it was.
    """
    target = Path(os.path.realpath(target))
    _refuse_special(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as cause:  # what is there is no folder
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target.parent)) from cause
    temporary = _temporary(target)
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(descriptor)
        _refuse_special(target)  # again: it may have come while the file was filled
        if overwrite:
            os.replace(temporary, target)
        else:
            _rename_new(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # the new name survives a power cut where the system lets a folder be opened
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def check_writable(target: Path) -> None:
    """Raise, before long work begins, what `write_atomically` would raise for `target`; nothing is written."""
    target = Path(os.path.realpath(target))
    _refuse_special(target)
    folder = target.parent
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is no folder", str(target))
    for part in (*target.relative_to(folder).parts, _temporary(target).name):
        with suppress(FileNotFoundError):  # what is not there yet may still have too long a name
            os.lstat(folder / part)
    tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def writing_named(path: str | os.PathLike[str], error: type[InputError]) -> Iterator[None]:
    """Turn what the system refuses while `path` is written into one `error` that names it."""
    path = as_path(path, error)
    try:
        is_name = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise error(f"{path} cannot be written: it is no name of a file. Choose another path")
    try:
        yield
    except ForerouteError:
        raise
    except OSError as cause:
        taken = isinstance(cause, FileExistsError)
        state = "nothing was changed. Choose another path" if taken else "what was there before is whole"
        raise error(f"{path} cannot be written ({cause.strerror or cause}); {state}") from cause


def _refuse_special(target: Path) -> None:
    """Refuse a folder, a FIFO, a device or a socket."""
    with suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(os.stat(target).st_mode):
            raise FileExistsError(None, "it exists and is no regular file")


def _temporary(target: Path) -> Path:
    """Return the name of a file on its way to `target`."""
    return target.parent / f".{target.name}.{secrets.token_hex(4)}"


def _rename_new(temporary: Path, target: Path) -> None:
    """Rename a file, and raise `FileExistsError` where the name is taken."""
    # a link looks whether the name is free and takes it in one step
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError as cause:  # a file system without links
        if target.exists():
            raise FileExistsError(None, "it exists") from cause
        os.replace(temporary, target)
    else:
        os.unlink(temporary)
