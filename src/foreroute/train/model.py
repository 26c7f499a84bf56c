"""The model that a configuration asks for."""

from __future__ import annotations

from typing import Any

from foreroute.adapters import hf
from foreroute.train.config import ModelConfig
from foreroute.train.precision import in_dtype
from foreroute.train.tasks import Task


def make_model(config: ModelConfig, task: Task, seed: int) -> Any:
    """A model with initial weights. Its configuration names the task's pad token.

    Raises:
        ConfigError: when transformers cannot make it.
    """
    model = hf.build_model(
        config.family,
        seed=seed,
        experts_implementation=config.experts_implementation,
        **{**config.sizes, "vocab_size": task.vocabulary_size},
    )
    model.config.get_text_config().pad_token_id = task.pad_token
    return in_dtype(model, config)
