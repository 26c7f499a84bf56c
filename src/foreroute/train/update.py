"""Stage 3, update: mini-steps of the clipped policy gradient, each accumulated over micro-steps."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.hf import RoutedModel
from foreroute.errors import DivergedError
from foreroute.layout import by_token_budget
from foreroute.trace import RoutingTrace
from foreroute.train.config import RLConfig
from foreroute.train.forward import response_logprobs
from foreroute.train.rollout import Experience


@dataclass(frozen=True)
class Updated:
    """What an update did.

    Attributes:
        loss: mean over mini-steps.
        grad_norm: mean over mini-steps, before clipping.
        clip_share: share of the trained response tokens whose ratio was clipped.
        micro_step_S: int64 [S], the micro-step of each sequence; -1 where it was left out.
    """

    loss: float
    grad_norm: float
    clip_share: float
    micro_step_S: NDArray[np.int64]


def update(
    routed: RoutedModel,
    optimizer: torch.optim.Optimizer,
    experience: Experience,
    old_logprobs_R: NDArray[np.float32],
    routes: RoutingTrace | None,
    config: RLConfig,
    *,
    seed: tuple[int, int],
    weight_version: int,
    temperature: float,
) -> Updated:
    """Take `config.mini_steps` optimizer steps on one rollout.

    Args:
        routed: the policy.
        optimizer: over its parameters.
        experience: the rollout with its advantages; groups of equal rewards are left out.
        old_logprobs_R: float32 [R], from recompute.
        routes: of all S sequences, to replay in every forward and recomputation; None for the policy's own.
        config: of the loss and of the batches.
        seed: of the order of the sequences.
        weight_version: of the policy before this update; `routes` must carry it.
        temperature: of the rollout.

    Raises:
        StaleTraceError: when `routes` belong to another step.
        DivergedError: when loss or gradients are not finite; no optimizer step is taken with them.
    """
    batch = _Batch(routed, experience, old_logprobs_R, routes, config, weight_version, temperature)
    order = np.random.default_rng([*seed, 2]).permutation(np.flatnonzero(experience.informative_S))
    micro_step_S = np.full(len(experience.generation), -1, np.int64)
    losses, norms, clipped = [], [], 0
    mini_batches = [part for part in np.array_split(order, config.mini_steps) if len(part)]
    for mini_batch in mini_batches:
        loss, num_clipped = batch.accumulate(mini_batch, micro_step_S)
        norm = torch.nn.utils.clip_grad_norm_(routed.model.parameters(), config.max_grad_norm).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(f"loss {loss} and gradient norm {norm} in step {seed[1]}; lower rl.learning_rate")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
        norms.append(norm)
        clipped += num_clipped
    num_tokens = int(experience.generation.response_lengths[order].sum())
    return Updated(
        float(np.mean(losses or [0.0])), float(np.mean(norms or [0.0])), clipped / max(num_tokens, 1), micro_step_S
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
    experience: Experience
    old_logprobs_R: NDArray[np.float32]
    routes: RoutingTrace | None
    config: RLConfig
    weight_version: int
    temperature: float

    def accumulate(self, mini_batch: NDArray[np.int64], micro_step_S: NDArray[np.int64]) -> tuple[float, int]:
        """Gradients of the mean token loss of a mini-batch; numbers its micro-steps. Returns loss, clipped tokens."""
        generation = self.experience.generation
        num_tokens = int(generation.response_lengths[mini_batch].sum())
        total, clipped = 0.0, 0
        for picked in by_token_budget(generation.trace.lengths[mini_batch], self.config.micro_step_tokens, padded=True):
            sequences = mini_batch[picked]
            micro_step_S[sequences] = micro_step_S.max() + 1
            with self._replaying(sequences):
                loss, num_clipped = self._loss(sequences)
                (loss / num_tokens).backward()
            total += loss.item()
            clipped += num_clipped
        return total / num_tokens, clipped

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

    def _replaying(self, sequences: NDArray[np.int64]) -> AbstractContextManager[Any]:
        if self.routes is None:
            return nullcontext()
        return self.routed.replay(self.routes.select(sequences), weight_version=self.weight_version)
