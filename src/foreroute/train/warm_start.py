"""Before RL: supervised training on right answers, until the model half knows the task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from foreroute.errors import ConfigError
from foreroute.train.chain import Demonstration, Task
from foreroute.train.config import TrainConfig, WarmStartConfig
from foreroute.train.folder import as_run_folder_error, load_checkpoint
from foreroute.train.policy import to_training

SMOOTHING = 0.9
"""Decay of the moving average that ends the warm start: it forgets a step within some ten others."""


def warm_start(
    model: Any, config: TrainConfig, task: Task, on_step: Callable[[int, float], None], should_stop: Callable[[], bool]
) -> bool:
    """Give `model` the weights that RL starts from: those of a checkpoint, or trained until the loss is low enough.

    `on_step` is told the step and the smoothed loss. False where `should_stop` stopped it; the model is then of no use.
    """
    settings = config.warm_start
    if settings.checkpoint is not None:
        weights = load_checkpoint(Path(settings.checkpoint))["model"]
        with as_run_folder_error(f"warm_start.checkpoint {settings.checkpoint}"):
            model.load_state_dict(weights)
        return True
    if settings.max_steps == 0 or config.task.data is not None:
        return True
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.max_steps)
    smoothed = float("nan")
    to_training(model)
    for step in range(settings.max_steps):
        rng = np.random.default_rng([config.seed, step, 0])
        loss = _loss(model, settings, task.demonstrations(settings.batch_size, rng))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        # one read of the device a step, which a small model does not notice
        smoothed = loss.item() if step == 0 else SMOOTHING * smoothed + (1 - SMOOTHING) * loss.item()
        on_step(step, smoothed)
        # a loss and not a number of steps: the task is learned suddenly, and a solved model shows no mismatch
        if smoothed < settings.stop_at_loss:
            break
        if should_stop():
            return False
    return True


def _loss(model: Any, settings: WarmStartConfig, demonstrations: list[Demonstration]) -> torch.Tensor:
    sequences = [torch.from_numpy(np.concatenate(each)).long() for each in demonstrations]
    tokens_BT = pad_sequence(sequences, batch_first=True)
    positions_T = torch.arange(tokens_BT.shape[1])
    prompts_B1 = torch.tensor([[len(prompt)] for prompt, _ in demonstrations])
    lengths_B1 = torch.tensor([[len(tokens)] for tokens in sequences])
    mask_BT = positions_T < lengths_B1
    answers_BT = mask_BT & (positions_T >= prompts_B1)
    tokens_BT, answers_BT = tokens_BT.to(model.device), answers_BT.to(model.device)
    mask = None if mask_BT.all() else mask_BT.long().to(model.device)
    output = model(
        input_ids=tokens_BT, attention_mask=mask, use_cache=False, output_router_logits=settings.aux_loss > 0
    )
    # the logits at position p are those of token p + 1
    loss = cross_entropy(output.logits[:, :-1][answers_BT[:, 1:]], tokens_BT[:, 1:][answers_BT[:, 1:]])
    if not settings.aux_loss:
        return loss
    if getattr(output, "aux_loss", None) is None:
        raise ConfigError(f"{model.config.model_type} has no load-balancing loss; set warm_start.aux_loss = 0.0")
    balanced: torch.Tensor = loss + settings.aux_loss * output.aux_loss
    return balanced
