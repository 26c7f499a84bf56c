"""Files and folders that are there in whole or not at all, and never in the place of something that is no file."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from foreroute.errors import ForerouteError, InputError

_RANDOM = re.compile(r"[0-9a-f]{8}")


def write_atomically(
    target: Path, content: bytes | str | Callable[[IO[bytes]], None], *, overwrite: bool = True
) -> None:
    """Fill a temporary file beside `target`, flush it to disk, then move it into place.

    The temporary file is named `.<name>.<random>` and locked while it is written. One that a killed process left behind
    is locked by nobody, and the next write to the same target removes it. A link is followed: the file that it points
    at is replaced, not the link.

    Args:
        target: the file to write; folders on the way are made.
        content: bytes, text to be written as UTF-8, or a function that writes to an opened file.
        overwrite: whether a file that is there may be replaced.

    Raises:
        FileExistsError: when `target` is there, or appears meanwhile, and `overwrite` is False; when it is a folder, a
            FIFO, a device or a socket, always.
        OSError: what the system refuses. `target` is as it was.
    """
    target = Path(os.path.realpath(target))
    _refuse_special(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:  # what is there is no folder
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(target.parent)) from error
    _remove_left_behind(target)
    temporary, descriptor = _new_temporary(target)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(descriptor)
            # still locked, so that nobody takes it for left behind
            if overwrite:
                _refuse_special(target)
                os.replace(temporary, target)
            else:
                _claim(target, temporary)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(target.parent)


def write_folder_atomically(target: Path, contents: Mapping[str, str]) -> None:
    """Fill a temporary folder beside `target`, flush it to disk, then move it into place.

    The temporary folder is named and locked as the files of `write_atomically` are. One that a killed process left
    behind is removed by the next write to the same target, unless it holds anything but files of these names.

    Args:
        target: the folder, which is empty or not there; folders on the way are made.
        contents: text of files by name, to be written as UTF-8.

    Raises:
        OSError: what the system refuses, and when `target` holds something or is no folder. It is as it was.
    """
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in _temporaries(target):
        with suppress(OSError):
            _remove_folder_left_behind(path, contents.keys())
    temporary, descriptor = _new_temporary_folder(target)
    try:
        for name, text in contents.items():
            with (temporary / name).open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        os.fsync(descriptor)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)
    _sync_folder(target.parent)


def check_writable(target: Path) -> None:
    """See whether `write_atomically` could write, by writing nothing, so that long work is not done in vain.

    Args:
        target: need not exist, nor the folder that it is in.

    Raises:
        FileExistsError: when it is a folder, a FIFO, a device or a socket.
        OSError: what the system would refuse: no permission, a parent that is a file, a name that is too long.
    """
    target = Path(os.path.realpath(target))
    _refuse_special(target)
    folder = target.parent
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is no folder", str(target))
    for part in target.relative_to(folder).parts:  # those that are not there yet may still be too long
        with suppress(FileNotFoundError):
            os.lstat(folder / part)
    temporary, descriptor = _new_temporary(folder / target.name)
    os.unlink(temporary)
    os.close(descriptor)


@contextmanager
def writing_named(path: str | os.PathLike[str], kind: type[InputError]) -> Iterator[None]:
    """What the system refuses while `path` is written becomes one error of `kind` that names it.

    Raises:
        kind: for `FileExistsError` of `write_atomically`, and for any other `OSError`: a full disk, no permission, a
            parent that is a file, a name that is too long.
    """
    try:
        yield
    except ForerouteError:
        raise
    except FileExistsError as error:
        raise kind(
            f"{path} cannot be written ({error.strerror or error}); nothing was changed. Choose another path"
        ) from error
    except OSError as error:
        raise kind(f"{path} cannot be written ({error.strerror or error}); what was there before is whole") from error


def _refuse_special(target: Path) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISREG(os.stat(target).st_mode):
            raise FileExistsError(None, "it exists and is no regular file")


def _new_temporary(target: Path) -> tuple[str, int]:
    """A locked empty file beside `target`: its name and descriptor."""
    while True:
        temporary = str(target.parent / f".{target.name}.{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody found it before it was locked, and removes it
            os.close(descriptor)
            continue
        except OSError:  # a file system without locks: nothing is removed there either
            return temporary, descriptor
        if os.path.exists(temporary):
            return temporary, descriptor
        os.close(descriptor)


def _temporaries(target: Path) -> list[Path]:
    """What is named as if it were written to become `target`."""
    prefix = f".{target.name}."
    return [
        path
        for path in target.parent.iterdir()
        if path.name.startswith(prefix) and _RANDOM.fullmatch(path.name[len(prefix) :])
    ]


def _new_temporary_folder(target: Path) -> tuple[Path, int]:
    """A locked empty folder beside `target`: its path and descriptor."""
    while True:
        temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}"
        temporary.mkdir()
        with suppress(FileNotFoundError):  # somebody found it before it was locked, and removed it
            descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with suppress(OSError):  # a file system without locks: nothing is removed there either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.exists(temporary):
                return temporary, descriptor
            os.close(descriptor)


def _remove_folder_left_behind(path: Path, names: Collection[str]) -> None:
    """Remove a temporary folder whose writer is gone, and that holds nothing but files of these names.

    A writer that was at work until now has renamed it, and `path` is no longer the folder that was opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            return
        held = list(os.scandir(descriptor))
        if all(entry.name in names and entry.is_file(follow_symlinks=False) for entry in held):
            for entry in held:
                os.unlink(entry.name, dir_fd=descriptor)
            os.rmdir(path)
    finally:
        os.close(descriptor)


def _remove_left_behind(target: Path) -> None:
    """Remove temporary files of the same target whose writer is gone. A living one holds a lock on its own."""
    for path in _temporaries(target):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(descriptor)


def _claim(target: Path, temporary: str) -> None:
    """Rename `temporary` to `target` unless that is taken. A link looks and names in one step; a rename does not."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError as error:  # a file system without links
        if target.exists():
            raise FileExistsError(None, "it exists") from error
        os.replace(temporary, target)
    else:
        os.unlink(temporary)


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power cut, where the system lets a folder be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
