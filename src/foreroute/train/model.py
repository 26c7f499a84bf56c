"""The model that a configuration asks for, made, loaded, and written for others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from foreroute.adapters import hf
from foreroute.adapters.checkpoint import CheckpointWriter
from foreroute.errors import ConfigError
from foreroute.train.config import ModelConfig
from foreroute.train.precision import in_dtype
from foreroute.train.tasks import Task


def make_model(config: ModelConfig, task: Task, seed: int) -> Any:
    """A model with its first weights.

    Raises:
        ConfigError: when transformers cannot make or load it, or it has no embedding for a token of the task.
    """
    if config.path is None:
        model = hf.build_model(
            str(config.family),
            seed=seed,
            experts_implementation=config.experts_implementation,
            **{**config.sizes, "vocab_size": task.vocabulary_size},
        )
        return in_dtype(model, config)
    model = hf.load_pretrained(Path(config.path), experts_implementation=config.experts_implementation)
    _require_embeddings(model, config, task)
    return in_dtype(model, config)


def write_model(model: Any, weights: Mapping[str, Tensor], task: Task, folder: Path) -> None:
    """Write a Hugging Face folder: configuration, weights, and the task's tokenizer."""
    CheckpointWriter(model).write(folder, weights)
    task.save_tokenizer(folder)


def _require_embeddings(model: Any, config: ModelConfig, task: Task) -> None:
    embeddings = model.get_input_embeddings().num_embeddings
    if task.vocabulary_size > embeddings:
        raise ConfigError(
            f"the tokenizer in {config.tokenizer_folder} has {task.vocabulary_size} tokens, the model in {config.path} "
            f"embeds {embeddings}; name the tokenizer that the model was trained with as model.tokenizer"
        )
