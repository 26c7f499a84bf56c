"""Before RL: supervised training on right answers, until the model half knows the task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from foreroute.errors import ConfigError
from foreroute.replay import to_device
from foreroute.train.checkpoint import load_checkpoint
from foreroute.train.config import TrainConfig, WarmStartConfig
from foreroute.train.optimizer import make_optimizer
from foreroute.train.run_folder import misfit_named
from foreroute.train.tasks import Demonstration, Task

SMOOTHING = 0.9
"""Of the moving average that ends the warm start: it forgets a step within some ten others."""


def warm_start(
    model: Any,
    config: TrainConfig,
    task: Task,
    on_step: Callable[[int, float], None],
    should_stop: Callable[[], bool],
) -> bool:
    """Give `model` the weights that RL starts from: those of a checkpoint, or trained until the loss is low enough.

    A loss and not a number of steps ends it: the task is learned suddenly, and a solved model shows no mismatch.

    Args:
        model: a causal language model.
        config: the run; `config.warm_start` is used.
        task: whose right answers are taught.
        on_step: told the step and the smoothed loss after each step.
        should_stop: asked after each step.

    Returns:
        False when it was stopped; the model is then of no use.

    Raises:
        ConfigError: when the task knows no right answers, or the model has no load-balancing loss.
        RunFolderError: when the checkpoint is damaged, or of another model.
    """
    settings = config.warm_start
    if settings.checkpoint is not None:
        weights = load_checkpoint(Path(settings.checkpoint))["model"]
        with misfit_named(f"warm_start.checkpoint {settings.checkpoint}"):
            model.load_state_dict(weights)
        return True
    if settings.max_steps == 0:
        return True
    optimizer = make_optimizer(model, lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.max_steps)
    smoothed = float("nan")
    model.train()
    for step in range(settings.max_steps):
        rng = np.random.default_rng([config.seed, step, 0])
        loss = _loss(model, settings, task.demonstrations(settings.batch_size, rng))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        smoothed = loss.item() if step == 0 else SMOOTHING * smoothed + (1 - SMOOTHING) * loss.item()
        on_step(step, smoothed)
        if smoothed < settings.stop_at_loss:
            break
        if should_stop():
            return False
    return True


def _loss(model: Any, settings: WarmStartConfig, demonstrations: list[Demonstration]) -> torch.Tensor:
    tokens, there, answers = _padded(demonstrations)
    device = model.device
    tokens_BT, answers_BT = to_device(tokens, device), to_device(answers, device)
    mask = None if there.all() else to_device(there.astype(np.int64), device)
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


def _padded(demonstrations: list[Demonstration]) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Pad tokens [B, T] on the right; returns also which of them there are, and which are of answers."""
    prompts_B = np.array([len(each.prompt) for each in demonstrations])[:, None]
    lengths_B = prompts_B + np.array([len(each.answer) for each in demonstrations])[:, None]
    positions_T = np.arange(lengths_B.max())
    mask_BT = positions_T < lengths_B
    tokens_BT = np.zeros(mask_BT.shape, np.int64)
    tokens_BT[mask_BT] = np.concatenate([part for each in demonstrations for part in (each.prompt, each.answer)])
    answers_BT = mask_BT & (positions_T >= prompts_B)
    return tokens_BT, mask_BT, answers_BT
