"""Weights of a Hugging Face model, as a folder that an engine loads."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import logging

from foreroute.errors import ConfigError
from foreroute.files import writing_named

MARKER = ".foreroute-weights"
"""The file that tells a folder of ours, and is locked by the trainer that has it."""
_CHECKPOINT = re.compile(r"\.?weights-[0-9a-f]{8}")


class CheckpointWriter:
    """Writes checkpoints of one model, in the layout of the hub.

    In memory transformers 5 holds all experts of a layer in one parameter; `save_pretrained` takes them apart again,
    as engines expect.

    Args:
        model: a transformers model; kept, for its configuration and layout.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def write(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> Path:
        """Write configuration and weights (the model's own if none are given) to a folder that is new or empty.

        Raises:
            ConfigError: when something is in the folder, or it cannot be written.
        """
        with writing_named(folder, ConfigError):
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise ConfigError(f"{folder} is not empty; nothing was written. Name a new or an empty folder")
            try:
                with without_progress_bars():
                    self._model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
            except SafetensorError as error:  # what the system refuses while tensors are written, as text alone
                raise OSError(None, str(error)) from error
        return folder


class WeightsFolder:
    """A folder through which one trainer hands checkpoints to an engine.

    A checkpoint is written under another name and renamed when it is whole, and its name is never used again: whoever
    is told a name reads this checkpoint or none. The one before is removed first. Nothing else there is touched.

    Args:
        path: made if it is missing; empty, or one that an earlier trainer had in the same way.
        model: whose checkpoints they are, as in `CheckpointWriter`.

    Raises:
        ConfigError: when there is something else in the folder, another trainer has it, or it cannot be written.
    """

    def __init__(self, path: Path, model: Any) -> None:
        self._path, self._writer = path, CheckpointWriter(model)
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

    def put(self, weights: Mapping[str, Tensor]) -> Path:
        """Write a checkpoint; the absolute path of it.

        Raises:
            ConfigError: when it cannot be written.
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


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """While the context is open, transformers draws none."""
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()
