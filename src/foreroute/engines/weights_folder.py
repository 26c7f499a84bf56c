"""The folder through which a trainer hands checkpoints to an engine."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import weakref
from contextlib import suppress
from pathlib import Path

from foreroute.adapters.checkpoint import CheckpointWriter, Weights
from foreroute.errors import ConfigError
from foreroute.files import writing_named

MARKER = ".foreroute-weights"
"""The file that tells a folder of ours, and is locked by the trainer that has it."""
_CHECKPOINT = re.compile(r"\.?weights-[0-9a-f]{8}")


class WeightsFolder:
    """A folder through which one trainer hands checkpoints to an engine.

    A checkpoint is written under another name and renamed when it is whole, and its name is never used again: whoever
    is told a name reads this checkpoint or none. The one before is removed first. Nothing else there is touched.

    Args:
        path: made if it is missing; empty, or one that an earlier trainer had in the same way.
        writer: of the checkpoints.

    Raises:
        ConfigError: when there is something else in the folder, another trainer has it, or it cannot be written.
    """

    def __init__(self, path: Path, writer: CheckpointWriter) -> None:
        self._path, self._writer = path, writer
        with writing_named(path, ConfigError):
            path.mkdir(parents=True, exist_ok=True)
            marker = path / MARKER
            if not marker.is_file() and any(path.iterdir()):
                raise ConfigError(
                    f"{path} holds files that no trainer of foreroute put there; nothing was changed. Name a new or an "
                    "empty folder for weights"
                )
            descriptor = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        self.close = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ConfigError(f"{path} is in use by another trainer; give each a folder of its own") from error
        except OSError:  # a file system without locks
            pass

    def put(self, weights: Weights) -> Path:
        """Write a checkpoint; the absolute path of it.

        Raises:
            ConfigError: when it cannot be written, or the writer refuses the weights.
        """
        name = f"weights-{secrets.token_hex(4)}"
        with writing_named(self._path, ConfigError):
            for path in self._path.iterdir():
                if _CHECKPOINT.fullmatch(path.name):
                    shutil.rmtree(path)
            unfinished = self._path / f".{name}"
            try:
                self._writer.write(unfinished, weights)
                unfinished.rename(self._path / name)
            except BaseException:
                with suppress(OSError):
                    shutil.rmtree(unfinished)
                raise
        return (self._path / name).resolve()
