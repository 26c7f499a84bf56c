"""Weights of a Hugging Face model, as a folder that an engine loads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.utils import logging


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
        """Write configuration and weights (the model's own if none are given) to `folder`, replacing what is there."""
        shutil.rmtree(folder, ignore_errors=True)
        with without_progress_bars():
            self._model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
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
