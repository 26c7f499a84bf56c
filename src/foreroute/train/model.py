"""The model that a configuration asks for, made, loaded, and written for others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreroute.adapters import hf
from foreroute.adapters.checkpoint import ModelWriter
from foreroute.errors import AttachError, ConfigError
from foreroute.train.config import ModelConfig, TrainConfig
from foreroute.train.device import CPU
from foreroute.train.precision import checkpointed, in_dtype
from foreroute.train.tasks import Task


def make_model(config: ModelConfig, task: Task, seed: int, device: torch.device = CPU) -> Any:
    """A model with its first weights, which are made on the CPU: a seed gives the same ones on every device.

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
        return in_dtype(model.to(device), config)
    model = hf.load_pretrained(Path(config.path), experts_implementation=config.experts_implementation)
    _require_embeddings(model, config, task)
    return in_dtype(model.to(device), config)


def make_policy(config: TrainConfig, task: Task, device: torch.device = CPU) -> hf.RoutedTransformer:
    """The model, with initial weights, ready to record and replay.

    Raises:
        ConfigError: when it cannot be had, or has no routers that can be recorded and replayed.
    """
    model = checkpointed(make_model(config.model, task, config.seed, device), config.model)
    model.train()
    try:
        return hf.attach(model)
    except AttachError as error:
        raise ConfigError(
            f"the model of {config.model.path or config.model.family} cannot be trained: {error}"
        ) from error


def trainable(config: TrainConfig, policy: hf.RoutedTransformer) -> hf.RoutedTransformer:
    """The policy, changed in place: with adapters if there are to be some, and gradients where RL changes weights."""
    lora = config.model.lora
    if lora.rank:
        hf.add_lora(policy.model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=config.seed)
        policy = hf.attach(policy.model)
    if lora.rank or config.rl.router == "frozen":
        for parameter in policy.router_parameters():
            parameter.requires_grad_(config.rl.router == "trained")
    return policy


def write_model(model: Any, weights: Mapping[str, Tensor], task: Task, folder: Path) -> None:
    """Write a Hugging Face folder: configuration, weights, and the task's tokenizer."""
    ModelWriter(model).write(folder, weights)
    task.save_tokenizer(folder)


def _require_embeddings(model: Any, config: ModelConfig, task: Task) -> None:
    embeddings = model.get_input_embeddings().num_embeddings
    if task.vocabulary_size > embeddings:
        raise ConfigError(
            f"the tokenizer in {config.tokenizer_folder} has {task.vocabulary_size} tokens, the model in {config.path} "
            f"embeds {embeddings}; name the tokenizer that the model was trained with as model.tokenizer"
        )
