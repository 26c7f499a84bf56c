"""The folder through which a trainer sends checkpoints to an engine."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import weakref
from contextlib import suppress
from pathlib import Path

from foreroute.adapters.checkpoint import CheckpointWriter, Weights
from foreroute.errors import ConfigError
from foreroute.files.regular import as_path
from foreroute.files.writing import writing_named

SUBFOLDER = "foreroute-weights"


class WeightsFolder:
    """The folder `foreroute-weights` in one of the user's, locked by one trainer.

    Nothing beside it is touched. Raises `ConfigError` when another trainer has it, or it cannot be written.
    """

    def __init__(self, path: Path, writer: CheckpointWriter) -> None:
        self._path, self._writer = as_path(path, ConfigError).absolute() / SUBFOLDER, writer
        with writing_named(self._path, ConfigError):
            self._path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        # called as a method, or when this object goes; the second call does nothing
        self.close = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ConfigError(f"{path} is in use by another trainer; give each a folder of its own") from error
        except OSError:
            pass  # a file system without locks

    def put(self, weights: Weights) -> Path:
        """Write a checkpoint in the place of the one before; return its absolute path.

        Raises `ConfigError` when it cannot be written, or the writer refuses the weights.
        """
        # a name is never used again: an engine that is late reads this checkpoint or none, and never half of another
        folder = self._path / secrets.token_hex(4)
        with writing_named(self._path, ConfigError):
            for before in self._path.iterdir():
                shutil.rmtree(before)
            try:
                return self._writer.write(folder, weights)
            except BaseException:
                with suppress(OSError):
                    shutil.rmtree(folder)
                raise
