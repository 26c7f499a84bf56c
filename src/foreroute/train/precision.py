"""What a model computes in, and which activations it keeps for the backward."""

from __future__ import annotations

from typing import Any

import torch

from foreroute.errors import ConfigError
from foreroute.train.config import ModelConfig


def in_dtype(model: Any, config: ModelConfig) -> Any:
    """The model, its parameters in `config.dtype`, whose gradients are float32 and so add up over micro-steps.

    Buffers, such as the frequencies of positions and the biases of routers, stay as they are.

    Raises:
        ConfigError: where torch cannot keep gradients in float32.
    """
    if config.dtype == "float32":
        return model
    if not hasattr(torch.Tensor, "grad_dtype"):
        raise ConfigError(
            f'model.dtype = "{config.dtype}" needs a torch that keeps gradients in float32 (Tensor.grad_dtype), and '
            f"{torch.__version__} does not; install the torch of constraints.txt"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
        parameter.grad_dtype = torch.float32
    return model


def checkpointed(model: Any, config: ModelConfig) -> Any:
    """The model, computing the activations of its layers again in the backward if `config` says so.

    Raises:
        ConfigError: when the family cannot.
    """
    if config.gradient_checkpointing == "off":
        return model
    reentrant = config.gradient_checkpointing == "reentrant"
    if not model.supports_gradient_checkpointing:
        raise ConfigError(f'{config.family} has no activation checkpointing; set model.gradient_checkpointing = "off"')
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant and config.lora.rank:
        # with frozen embeddings no input of a layer asks for gradients, and a reentrant checkpoint would give none
        model.enable_input_require_grads()
    return model
