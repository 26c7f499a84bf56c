"""Stage 3, update: mini-steps of the clipped policy gradient, each accumulated over micro-steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.hf import RoutedModel
from foreroute.errors import DivergedError
from foreroute.trace import RoutingTrace
from foreroute.train.config import RLConfig
from foreroute.train.forward import inputs, response_logprobs
from foreroute.train.rollout import Experience
from foreroute.train.schedule import MicroSteps, Stage
from foreroute.train.whole import Execution


@dataclass(frozen=True)
class Updated:
    """What an update did.

    Attributes:
        loss: mean over mini-steps.
        grad_norm: mean over mini-steps, before clipping.
        clip_share: share of the trained response tokens whose ratio was clipped.
        micro_step_S: int64 [S], the micro-step of each sequence of this rank; -1 where it was left out.
    """

    loss: float
    grad_norm: float
    clip_share: float
    micro_step_S: NDArray[np.int64]


def update(
    routed: RoutedModel,
    execution: Execution,
    optimizer: torch.optim.Optimizer,
    experience: Experience,
    mini_steps: list[Stage],
    old_logprobs_R: NDArray[np.float32],
    routes: RoutingTrace | None,
    config: RLConfig,
    *,
    weight_version: int,
    temperature: float,
) -> Updated:
    """Take an optimizer step for each mini-step, on one rollout.

    Args:
        routed: the policy.
        execution: how it is executed.
        optimizer: over its parameters.
        experience: the rollout with its advantages.
        mini_steps: the sequences of each forward and backward.
        old_logprobs_R: float32 [R], from recompute.
        routes: of all S sequences, to replay in every forward and recomputation; None for the policy's own.
        config: of the loss.
        weight_version: of the policy before this update; `routes` must carry it.
        temperature: of the rollout.

    Raises:
        StaleTraceError: when `routes` belong to another step.
        DivergedError: when loss or gradients are not finite; no optimizer step is taken with them.
    """
    batch = _Batch(routed, execution, experience, old_logprobs_R, routes, config, weight_version, temperature)
    losses, norms, clipped, num_tokens = [], [], 0, 0
    for stage in mini_steps:
        with nullcontext() if routes is None else execution.running(stage, updating=True):
            summed, num_clipped, tokens = batch.accumulate(stage.micro_steps)
        loss, norm = summed / tokens, execution.finish_gradients(config.max_grad_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(
                f"loss {loss} and gradient norm {norm} in step {weight_version}; lower rl.learning_rate"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        execution.weights_changed()
        losses.append(loss)
        norms.append(norm)
        clipped, num_tokens = clipped + num_clipped, num_tokens + tokens
    return Updated(
        float(np.mean(losses or [0.0])),
        float(np.mean(norms or [0.0])),
        clipped / max(num_tokens, 1),
        _micro_step_S(mini_steps, len(experience.generation)),
    )


def clipped_loss(
    logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, int]:
    """Sum over tokens of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = exp(logprobs - old logprobs).

    Divided by the tokens of the whole mini-batch it does not depend on how that is cut into micro-batches.
    Sources: PPO, arXiv 1707.06347, equation 7; a higher upper bound and the token mean, DAPO, arXiv 2503.14476.

    Returns:
        The loss, and how many tokens had their ratio clipped.
    """
    ratio = (logprobs_R - old_logprobs_R).exp()
    free, bounded = ratio * advantages_R, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages_R
    return -torch.minimum(free, bounded).sum(), int((bounded < free).sum())


@dataclass(frozen=True, eq=False)
class _Batch:
    """What every micro-step of an update needs."""

    routed: RoutedModel
    execution: Execution
    experience: Experience
    old_logprobs_R: NDArray[np.float32]
    routes: RoutingTrace | None
    config: RLConfig
    weight_version: int
    temperature: float

    def accumulate(self, micro_steps: MicroSteps) -> tuple[float, int, int]:
        """Gradients of the mean token loss of a mini-batch.

        Returns:
            Summed loss, clipped tokens, and tokens, of all ranks.
        """
        ranks, taken = self.execution.ranks, np.concatenate(micro_steps)
        informative = taken[self.experience.informative_S[taken]]
        num_tokens = int(ranks.total([self.experience.generation.response_lengths[informative].sum()])[0])
        total, clipped = 0.0, 0
        for number, sequences in enumerate(micro_steps):
            with self._replaying(number, sequences):
                loss, num_clipped = self._loss(sequences)
                (loss / num_tokens).backward()
            total += loss.item()
            clipped += num_clipped
        summed, all_clipped = ranks.total([total, clipped]).tolist()
        return summed, int(all_clipped), num_tokens

    def _loss(self, sequences: NDArray[np.int64]) -> tuple[Tensor, int]:
        generation = self.experience.generation
        part = generation.select(sequences)
        logprobs_R, _ = response_logprobs(self.routed.model, part, self.temperature)
        old = np.split(self.old_logprobs_R, np.cumsum(generation.response_lengths)[:-1])
        advantages = np.repeat(self.experience.advantages_S[sequences], part.response_lengths)
        return clipped_loss(
            logprobs_R,
            torch.from_numpy(np.concatenate([old[s] for s in sequences])),
            torch.from_numpy(advantages.astype(np.float32)),
            self.config.clip_low,
            self.config.clip_high,
        )

    @contextmanager
    def _replaying(self, number: int, sequences: NDArray[np.int64]) -> Iterator[None]:
        if self.routes is None:
            yield
            return
        routes = inputs(self.routes.select(sequences))
        with self.routed.replay(routes, weight_version=self.weight_version), self.execution.micro_step(number, routes):
            yield


def _micro_step_S(mini_steps: list[Stage], num_sequences: int) -> NDArray[np.int64]:
    micro_step_S = np.full(num_sequences, -1, np.int64)
    for number, sequences in enumerate(sequences for stage in mini_steps for sequences in stage.micro_steps):
        micro_step_S[sequences] = number
    return micro_step_S
