"""The folder through which a trainer hands checkpoints to an engine."""

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

OWN = "foreroute-weights"


class WeightsFolder:
    """The folder `foreroute-weights` in one of the user's, through which one trainer hands checkpoints to an engine.

    The name of a checkpoint is never used again, and told when it is whole: whoever is told it reads this checkpoint or
    none. The one before is removed first, whoever has left it. Nothing beside the folder is touched.

    Args:
        path: made if it is missing.
        writer: of the checkpoints.

    Raises:
        ConfigError: when another trainer has the folder, or it cannot be written.
    """

    def __init__(self, path: Path, writer: CheckpointWriter) -> None:
        self._path, self._writer = as_path(path, ConfigError).absolute() / OWN, writer
        with writing_named(self._path, ConfigError):
            self._path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
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
