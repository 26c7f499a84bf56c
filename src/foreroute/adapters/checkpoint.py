"""Weights of a Hugging Face model, as a folder that others load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import logging

from foreroute.errors import ConfigError
from foreroute.files import writing_named


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
