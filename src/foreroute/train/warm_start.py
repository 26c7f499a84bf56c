"""Before RL: supervised training on right answers, until the model half knows the task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from foreroute.errors import ConfigError
from foreroute.train.config import TrainConfig
from foreroute.train.optimizer import make_optimizer
from foreroute.train.task import encode, sample_problems

SMOOTHING = 0.9


def warm_start(
    model: Any, config: TrainConfig, on_step: Callable[[int, float], None], should_stop: Callable[[], bool]
) -> bool:
    """Train `model` in place until the smoothed loss is below the configured value.

    A loss and not a number of steps ends it: the task is learned suddenly, and a solved model shows no mismatch.

    Args:
        model: a causal language model.
        config: the run; `config.warm_start` is used.
        on_step: told the step and the smoothed loss after each step.
        should_stop: asked after each step.

    Returns:
        False when it was stopped; the model is then of no use.
    """
    settings = config.warm_start
    optimizer = make_optimizer(model, lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.max_steps)
    smoothed = float("nan")
    model.train()
    for step in range(settings.max_steps):
        rng = np.random.default_rng([config.seed, step, 0])
        loss = _loss(model, config, rng)
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


def _loss(model: Any, config: TrainConfig, rng: np.random.Generator) -> torch.Tensor:
    task, settings = config.task, config.warm_start
    operands = int(rng.integers(task.min_operands, task.max_operands + 1))
    problems = sample_problems(rng, settings.batch_size, min_operands=operands, max_operands=operands)
    tokens_BT = torch.from_numpy(np.stack([encode(p.prompt + p.answer) for p in problems]).astype(np.int64))
    answer = len(problems[0].prompt)
    output = model(input_ids=tokens_BT, use_cache=False, output_router_logits=settings.aux_loss > 0)
    loss = cross_entropy(output.logits[:, answer - 1 : -1].flatten(0, 1), tokens_BT[:, answer:].flatten())
    if not settings.aux_loss:
        return loss
    if getattr(output, "aux_loss", None) is None:
        raise ConfigError(f"{config.model.family} has no load-balancing loss; set warm_start.aux_loss = 0.0")
    balanced: torch.Tensor = loss + settings.aux_loss * output.aux_loss
    return balanced
