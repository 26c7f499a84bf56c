"""Objective of an update: small functions, each with its formula and source, over response tokens.

    rewards ─ group_advantages ─▶ A     log-probs ─ policy_log_ratio ─▶ r     trainer over engine: rho
                                  │                                     │     rho ─ min(rho, high) ─▶ w
                                  └────────── clipped_ratio: l(r, A) · w ─────────┘
                                                        │
                                  coefficients, denominator: c of a token, and D that the sum is divided by

A mini-batch's loss is Σ c_t l_t / D with a coefficient c_t that depends on nothing but the token's own sequence, and
one number D of the whole mini-batch. So it does not depend on how the mini-batch is cut into micro-steps, nor on
which rank takes which sequence. `token_losses` puts the functions together as the configuration says.

Axis letters: R response tokens, packed sequence after sequence, S sequences; `lengths_S` are the tokens of each.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.records.step_record import ImportanceRecord
from foreroute.train.config import Method, RLConfig

EQUAL = 1e-9
"""Rewards of a group that differ by no more than this part of the largest are equal, as 0.1 + 0.2 and 0.3 are."""
LOG_OF_FLOAT64 = math.log(np.finfo(np.float64).max)
"""Log of its largest number, which stands for every rho above."""


def group_advantages(rewards_S: NDArray[np.float64], group_size: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Compute advantages within groups, and which groups teach anything.

    A_i = (R_i - mean R) / std R, with the mean and the (population) standard deviation of the `group_size` rewards of
    one prompt. Source: GRPO, arXiv 2402.03300, section 4.1.2.

    Returns:
        float64 [S], exactly 0 in a group whose rewards are all equal but for rounding; and bool [S], False there.
    """
    groups = rewards_S.reshape(-1, group_size)
    # rewards that are equal but for rounding would be divided by a standard deviation of roundings
    spread = groups.max(axis=1, keepdims=True) - groups.min(axis=1, keepdims=True)
    differs = spread > EQUAL * np.abs(groups).max(axis=1, keepdims=True)
    centred = groups - groups.mean(axis=1, keepdims=True)
    scale = np.where(differs, groups.std(axis=1, keepdims=True), 1.0)
    advantages = np.where(differs, centred / scale, 0.0)
    return advantages.reshape(-1), np.broadcast_to(differs, groups.shape).reshape(-1)


def policy_log_ratio(logprobs_R: Tensor, old_logprobs_R: Tensor, lengths_S: Tensor, method: Method) -> Tensor:
    """Compute [R], the log of how much more probable a token is now than before the update; differentiable.

    dapo    log r_t = log π(y_t) - log π_old(y_t)                          PPO, arXiv 1707.06347, section 3
    gspo    log s_i = 1/|y_i| Σ_t log r_t, for every token of response i    GSPO, arXiv 2507.18071, equation 7
    """
    log_ratio_R = logprobs_R - old_logprobs_R
    if method == "dapo":
        return log_ratio_R
    number_R = torch.repeat_interleave(torch.arange(len(lengths_S), device=log_ratio_R.device), lengths_S)
    sum_S = log_ratio_R.new_zeros(len(lengths_S)).index_add(0, number_R, log_ratio_R)
    return (sum_S / lengths_S).repeat_interleave(lengths_S)


def clipped_ratio(
    log_ratio_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Compute -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Sources: PPO, arXiv 1707.06347, equation 7; a higher upper bound, DAPO, arXiv 2503.14476, section 3.1; with the
    ratio of whole responses GSPO, arXiv 2507.18071, equation 5.

    `log_ratio_R` is of tokens or of their responses. From a `clip_low` of 1 on there is no lower bound.

    Returns:
        Losses [R], differentiable; and bool [R], tokens whose update the bounds changed.
    """
    ratio_R = log_ratio_R.exp()
    free_R = ratio_R * advantages_R
    bounded_R = ratio_R.clamp(1 - clip_low, 1 + clip_high) * advantages_R
    # the lesser of both: a bound holds back an update, and never a correction of one that went too far
    return -free_R.minimum(bounded_R), bounded_R < free_R


def coefficients(lengths_S: Tensor, method: Method, dtype: torch.dtype) -> Tensor:
    """Compute [R], c_t, which the loss of each token is multiplied by.

    dapo    1         D = tokens of the mini-batch       DAPO, arXiv 2503.14476, equation 12
    gspo    1/|y_i|   D = sequences of the mini-batch    GSPO, arXiv 2507.18071, equation 5
    """
    if method == "gspo":
        return (1 / lengths_S.to(dtype)).repeat_interleave(lengths_S)
    return torch.ones(int(lengths_S.sum()), dtype=dtype, device=lengths_S.device)


def denominator(lengths_S: NDArray[np.int64], method: Method) -> int:
    """Compute the part of D that these sequences make up."""
    return int(lengths_S.sum()) if method == "dapo" else len(lengths_S)


class Tokens(NamedTuple):
    """Response tokens of whole sequences, packed."""

    logprobs_R: Tensor  # [R], of the policy as it is now, differentiable
    old_logprobs_R: Tensor  # [R], of the policy before the update, in the trainer
    engine_logprobs_R: Tensor  # [R], of the rollout
    advantages_R: Tensor  # [R]
    lengths_S: Tensor  # int64 [S]


class TokenLosses(NamedTuple):
    """Losses of response tokens, and what clipping and correction did to them."""

    losses_R: Tensor  # [R], differentiable
    clipped_R: Tensor  # bool [R], tokens whose update the clip bounds changed
    log_ratio_R: Tensor  # float64 [R], log of trainer over engine: finite where the ratio is not
    weights_R: Tensor  # [R], what the correction made of the ratio; 1 without one
    cut_R: Tensor  # bool [R], tokens for which it is another than the ratio


def token_losses(tokens: Tokens, config: RLConfig) -> TokenLosses:
    """Compute w(rho) l(r, A), without coefficients of the mean; w = min(rho, high), or 1 without a correction.

    rho compares the policy before the update with the engine, since r takes over from there. Source of w: truncated
    importance sampling, Yao et al. 2025, fengyao.notion.site/off-policy-rl.
    """
    now, old, engine, corrects = *tokens[:3], config.correction.method == "tis"
    log_ratio_R = policy_log_ratio(now, old, tokens.lengths_S, config.method)
    losses_R, clipped_R = clipped_ratio(log_ratio_R, tokens.advantages_R, config.clip_low, config.clip_high)
    # detached: the weight says how much a token counts, and is not trained
    ratio_R = (old - engine).detach().exp()
    weights_R = ratio_R.clamp(max=config.correction.high) if corrects else torch.ones_like(ratio_R)
    if corrects:
        losses_R = losses_R * weights_R
    cut_R = (weights_R != ratio_R) & corrects
    return TokenLosses(losses_R, clipped_R, (old.double() - engine.double()).detach(), weights_R, cut_R)


def importance_of(tokens_4R: NDArray[np.float64]) -> tuple[ImportanceRecord, float]:
    """Give how far trainer and engine are apart on R trained tokens, and the share of clipped ones; 0 of none."""
    # of each token whether it was clipped, log rho, w, and whether w is cut
    clipped_R, log_rho_R, weights_R, cut_R = tokens_4R
    log_largest, count = log_rho_R.max(initial=-np.finfo(np.float64).max), max(len(log_rho_R), 1)
    # rho is divided by the largest of all, which float64 may not hold
    ratio_R, largest = np.exp(log_rho_R - log_largest), math.exp(min(log_largest, LOG_OF_FLOAT64))
    importance = ImportanceRecord(
        ratio_mean=float(ratio_R.sum()) / count * largest,
        ratio_max=largest,
        effective_share=float(ratio_R.sum() ** 2 / (count * np.square(ratio_R).sum())) if len(ratio_R) else 0.0,
        weight_mean=float(weights_R.sum()) / count,
        cut_share=float(cut_R.sum()) / count,
    )
    return importance, float(clipped_R.sum()) / count
