"""Stage 3, update: mini-steps of the clipped policy gradient, each accumulated over micro-steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.hf import RoutedModel
from foreroute.capture import Generation
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
        clip_share: share of response tokens whose ratio was clipped.
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
    temperature: float,
) -> Updated:
    """Take `config.mini_steps` optimizer steps on one rollout.

    Args:
        routed: the policy.
        optimizer: over its parameters.
        experience: the rollout with its advantages; groups without variance are left out.
        old_logprobs_R: float32 [R], from recompute.
        routes: of all S sequences, to replay in every forward and recomputation; None for the policy's own.
        config: of the loss and of the batches.
        seed: of the order of the sequences.
        temperature: of the rollout.
    """
    generation = experience.generation
    old = np.split(old_logprobs_R, np.cumsum(generation.response_lengths)[:-1])
    order = np.random.default_rng([*seed, 2]).permutation(np.flatnonzero(experience.advantages_S))
    micro_step_S = np.full(len(generation), -1, np.int64)
    losses, norms, clipped, tokens = [], [], 0, 0
    for mini_batch in np.array_split(order, config.mini_steps):
        if not len(mini_batch):
            continue
        num_tokens = int(generation.response_lengths[mini_batch].sum())
        loss_sum = 0.0
        for picked in by_token_budget(generation.trace.lengths[mini_batch], config.micro_step_tokens, padded=True):
            sequences = mini_batch[picked]
            micro_step_S[sequences] = micro_step_S.max() + 1
            part = generation.select(sequences)
            with _replaying(routed, routes, sequences):
                logprobs_R, _ = response_logprobs(routed.model, part, temperature)
                loss, num_clipped = clipped_loss(
                    logprobs_R,
                    torch.from_numpy(np.concatenate([old[s] for s in sequences])),
                    _per_token(experience.advantages_S[sequences], part),
                    config.clip_low,
                    config.clip_high,
                )
                (loss / num_tokens).backward()
            loss_sum += loss.item()
            clipped += num_clipped
        norms.append(torch.nn.utils.clip_grad_norm_(routed.model.parameters(), config.max_grad_norm).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss_sum / num_tokens)
        tokens += num_tokens
    return Updated(
        float(np.mean(losses)) if losses else 0.0,
        float(np.mean(norms)) if norms else 0.0,
        clipped / max(tokens, 1),
        micro_step_S,
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


def _replaying(
    routed: RoutedModel, routes: RoutingTrace | None, sequences: NDArray[np.int64]
) -> AbstractContextManager[Any]:
    if routes is None:
        return nullcontext()
    (version,) = routes.versions
    return routed.replay(routes.select(sequences), weight_version=version)


def _per_token(values_S: NDArray[np.float64], generation: Generation) -> Tensor:
    return torch.from_numpy(np.repeat(values_S, generation.response_lengths).astype(np.float32))
