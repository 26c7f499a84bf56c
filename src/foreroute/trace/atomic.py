"""Files that are there in whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def write_atomically(target: Path, write: Callable[[str], None], *, overwrite: bool = True) -> None:
    """Let `write` fill a temporary file beside `target`, flush it to disk, then move it into place.

    The temporary file is named `.<name>.<random>`. A killed process leaves it behind; it holds nothing that is needed.

    Raises:
        FileExistsError: when `target` is there, or appears meanwhile, and `overwrite` is False.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = str(target.parent / f".{target.name}.{secrets.token_hex(4)}")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        write(temporary)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        if overwrite:
            os.replace(temporary, target)
        else:
            _claim(target, temporary)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _claim(target: Path, temporary: str) -> None:
    """Rename `temporary` to `target` unless that is taken. A link looks and names in one step; a rename does not."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError as error:  # a file system without links
        if target.exists():
            raise FileExistsError(f"{target} exists") from error
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
