"""Files in node-shared memory that no crash leaves behind: they lose their name as soon as everyone has opened them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path("/dev/shm")


@dataclass(frozen=True)
class NamedFile:
    """A file that still has its name, locked as long as it has.

    Attributes:
        path: for others to open.
        descriptor: holds the lock; the system lets it go when the process dies, however it dies.
    """

    path: Path
    descriptor: int

    def unname(self) -> None:
        """Remove the name. Who has the file open keeps it; the last to close it gives the memory back."""
        self.path.unlink(missing_ok=True)
        os.close(self.descriptor)


def create(directory: Path, num_bytes: int) -> NamedFile:
    """A new file of zeros, all of its memory taken.

    Raises:
        OSError: when the directory cannot hold it; nothing is left then. A write into a file that was only given its
            length would end the process instead (SIGBUS).
    """
    file = _locked(directory)
    try:
        os.posix_fallocate(file.descriptor, 0, num_bytes)
    except OSError:
        file.unname()
        raise
    return file


def remove_stale(directory: Path) -> int:
    """Remove this user's files whose makers died before they unnamed them. Returns how many."""
    removed = 0
    for path in directory.glob(f"{_prefix()}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed += 1
            finally:
                os.close(descriptor)
    return removed


def _locked(directory: Path) -> NamedFile:
    while True:
        path = directory / f"{_prefix()}{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return NamedFile(path, descriptor)
        # another process took it for stale between its creation and its lock
        os.close(descriptor)


def _prefix() -> str:
    return f"foreroute-{os.getuid()}-"
