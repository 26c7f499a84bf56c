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

OPEN_FILES = "/proc/self/fd"
"""Where Linux lists the open files of this process, so that one without a name can be given one."""


def write_atomically(
    target: Path, content: bytes | str | Callable[[IO[bytes]], None], *, overwrite: bool = True
) -> None:
    """Fill a file, flush it to disk, and name it `target`; folders on the way are made, and links are followed.

    Each of several writers of one target writes all of it, and the last one stays. A killed writer leaves nothing, or
    `.<name>.foreroute`, which the next write takes away; where no file can be without a name (NFS, macOS), it leaves
    `.<name>.<random>`, and that stays.

    Args:
        target: the file to write.
        content: bytes, text to be written as UTF-8, or a function that writes to an opened file.
        overwrite: whether a file that is there may be replaced.

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
    # of a file without a name, nothing is left when its writer is killed
    descriptor, named = _open_unnamed(target.parent), None
    if descriptor is None:
        named = _temporary(target, secrets.token_hex(4))
        descriptor = os.open(named, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(descriptor)
            _refuse_special(target)  # again: it may have come while the file was filled
            if named is not None:
                _rename(named, target, overwrite=overwrite)
            elif overwrite:
                _replace(descriptor, _temporary(target, "foreroute"), target)
            else:
                _name(descriptor, target)
    except BaseException:
        if named is not None:
            named.unlink(missing_ok=True)
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
    for part in (*target.relative_to(folder).parts, _temporary(target, "foreroute").name):
        with suppress(FileNotFoundError):  # what is not there yet may still have too long a name
            os.lstat(folder / part)
    tempfile.TemporaryFile(dir=folder).close()


@contextmanager
def writing_named(path: str | os.PathLike[str], error: type[InputError]) -> Iterator[None]:
    """Turn what the system refuses while `path` is written into one `error` that names it."""
    path = as_path(path, error)
    try:
        if b"\0" in os.fsencode(path):
            raise error(f"{path} cannot be written: a path has no NUL character. Choose another path")
    except UnicodeEncodeError as cause:
        raise error(
            f"{path} cannot be written: its letters cannot be encoded ({cause}). Choose another path"
        ) from cause
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


def _temporary(target: Path, end: str) -> Path:
    """Return the name of a file on its way to `target`."""
    return target.parent / f".{target.name}.{end}"


def _open_unnamed(folder: Path) -> int | None:
    """Open an empty file without a name; None where there are none, and a named one will tell why."""
    if hasattr(os, "O_TMPFILE") and os.path.isdir(OPEN_FILES):
        with suppress(OSError):
            return os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    return None


def _name(descriptor: int, name: Path) -> None:
    """Give an open file a name."""
    # only with a folder for the source does Python follow the link that stands for the open file
    os.link(f"{OPEN_FILES}/{descriptor}", name, src_dir_fd=descriptor, follow_symlinks=True)


def _replace(descriptor: int, temporary: Path, target: Path) -> None:
    """Name an open file `temporary` and rename that to `target`, beside others that do the same."""
    # `temporary` is never anything but a whole file on its way to `target`, so whoever finds one sends it there: that
    # of a killed writer goes, that of a living one has arrived. Nobody removes it: Linux names an open file only once.
    is_named = False
    while not is_named:
        with suppress(FileExistsError):
            _name(descriptor, temporary)
            is_named = True
        try:
            os.replace(temporary, target)
        except FileNotFoundError:
            pass  # another writer was faster
        except OSError:
            if is_named:
                temporary.unlink(missing_ok=True)
            raise


def _rename(temporary: Path, target: Path, *, overwrite: bool) -> None:
    """Rename a file, over another or not."""
    if overwrite:
        os.replace(temporary, target)
        return
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
