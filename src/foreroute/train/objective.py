"""What an update minimises: small functions, each with its formula and source, over response tokens.

    rewards ─ group_advantages ─▶ A     log-probs ─ policy_log_ratio ─▶ r     trainer over engine ─ engine_ratio ─▶ rho
                                  │                                     │     rho ─ correction_weights ─▶ w
                                  └───────── clipped_ratio, cispo or reinforce: l(r, A) · w, + β · kl ──────┘
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

from foreroute.train.config.rl import Advantage, Correction, Level, Mean, Rejection, RLConfig

EQUAL = 1e-9
"""Rewards of a group that differ by no more than this part of the largest are equal, as 0.1 + 0.2 and 0.3 are."""


def group_advantages(
    rewards_S: NDArray[np.float64], group_size: int, kind: Advantage = "group_std"
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Compute advantages within groups, and which groups teach anything.

        group_std    A_i = (R_i - mean R) / std R       GRPO, arXiv 2402.03300, section 4.1.2
        group_mean   A_i = R_i - mean R                 Dr. GRPO, arXiv 2503.20783, section 3.2; MiniRL, 2512.01374

    The mean and the (population) standard deviation are those of the `group_size` rewards of one prompt.

    Returns:
        float64 [S], exactly 0 in a group whose rewards are all equal but for rounding, or of which one is missing
        (NaN); and bool [S], False there.
    """
    groups = rewards_S.reshape(-1, group_size)
    complete = ~np.isnan(groups).any(axis=1, keepdims=True)
    spread = groups.max(axis=1, keepdims=True) - groups.min(axis=1, keepdims=True)
    differs = complete & (spread > EQUAL * np.abs(groups).max(axis=1, keepdims=True))
    centred = groups - groups.mean(axis=1, keepdims=True)
    scale = np.where(differs, groups.std(axis=1, keepdims=True), 1.0) if kind == "group_std" else 1.0
    advantages = np.where(differs, centred / scale, 0.0)
    return advantages.reshape(-1), np.broadcast_to(differs, groups.shape).reshape(-1)


def sequence_sum(values_R: Tensor, lengths_S: Tensor) -> Tensor:
    """Sum over each sequence: [S]."""
    number_R = torch.repeat_interleave(torch.arange(len(lengths_S), device=values_R.device), lengths_S)
    return values_R.new_zeros(len(lengths_S)).index_add(0, number_R, values_R)


def sequence_mean(values_R: Tensor, lengths_S: Tensor) -> Tensor:
    """Average over each sequence: [S]."""
    return sequence_sum(values_R, lengths_S) / lengths_S


def policy_log_ratio(logprobs_R: Tensor, old_logprobs_R: Tensor, lengths_S: Tensor, level: Level) -> Tensor:
    """Compute [R], the log of how much more probable a token is now than before the update; differentiable.

    token       log r_t = log π(y_t) - log π_old(y_t)                          PPO, arXiv 1707.06347, section 3
    sequence    log s_i = 1/|y_i| Σ_t log r_t, for every token of response i    GSPO, arXiv 2507.18071, equation 7
    """
    log_ratio_R = logprobs_R - old_logprobs_R
    if level == "token":
        return log_ratio_R
    return sequence_mean(log_ratio_R, lengths_S).repeat_interleave(lengths_S)


class Surrogate(NamedTuple):
    """Losses of response tokens, whose gradient is the policy gradient.

    Attributes:
        losses_R: [R], differentiable.
        clipped_R: bool [R], tokens whose update the bounds changed.
    """

    losses_R: Tensor
    clipped_R: Tensor


def clipped_ratio(log_ratio_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float) -> Surrogate:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    Sources: PPO, arXiv 1707.06347, equation 7; GRPO, arXiv 2402.03300, equation 3; a higher upper bound, DAPO, arXiv
    2503.14476, section 3.1; with the ratio of whole responses GSPO, arXiv 2507.18071, equation 5.

    Args:
        log_ratio_R: [R], of tokens or of their responses; the gradient flows through it.
        advantages_R: [R].
        clip_low: greater than 0; from 1 on there is no lower bound.
        clip_high: greater than 0.
    """
    ratio_R = log_ratio_R.exp()
    free_R = ratio_R * advantages_R
    bounded_R = ratio_R.clamp(1 - clip_low, 1 + clip_high) * advantages_R
    return Surrogate(-free_R.minimum(bounded_R), bounded_R < free_R)


def cispo(
    logprobs_R: Tensor, log_ratio_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float
) -> Surrogate:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π, where sg lets no gradient through.

    The bounds cap the weight of a token and never drop it. Source: MiniMax-M1, arXiv 2506.13585, section 3.1, which
    sets no lower bound (`clip_low` = 1).
    """
    ratio_R = log_ratio_R.detach().exp()
    weight_R = ratio_R.clamp(1 - clip_low, 1 + clip_high)
    return Surrogate(-weight_R * advantages_R * logprobs_R, weight_R != ratio_R)


def reinforce(
    logprobs_R: Tensor, log_ratio_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float
) -> Surrogate:
    """-M A log π, with M = 0 where A > 0 and r > 1 + clip_high, or A < 0 and r < 1 - clip_low, else 1.

    The importance weight of the policy as it is now comes on top, in `token_losses`. Source: REINFORCE with a baseline;
    the mask, MiniRL, arXiv 2512.01374.
    """
    ratio_R = log_ratio_R.detach().exp()
    too_far_R = ((advantages_R > 0) & (ratio_R > 1 + clip_high)) | ((advantages_R < 0) & (ratio_R < 1 - clip_low))
    return Surrogate(-(advantages_R * ~too_far_R) * logprobs_R, too_far_R)


def engine_ratio(logprobs_R: Tensor, engine_logprobs_R: Tensor, lengths_S: Tensor, level: Level) -> Tensor:
    """Compute [R], rho of each token, or of its response (the product over its tokens), without gradient."""
    log_ratio_R = (logprobs_R - engine_logprobs_R).detach()
    if level == "token":
        return log_ratio_R.exp()
    return sequence_sum(log_ratio_R, lengths_S).exp().repeat_interleave(lengths_S)


def engine_log_ratio(logprobs_R: Tensor, engine_logprobs_R: Tensor, lengths_S: Tensor, level: Level) -> Tensor:
    """Compute float64 [R], log rho, without gradient: finite where rho of a long response is not."""
    log_ratio_R = (logprobs_R.double() - engine_logprobs_R.double()).detach()
    if level == "token":
        return log_ratio_R
    return sequence_sum(log_ratio_R, lengths_S).repeat_interleave(lengths_S)


def correction_weights(ratio_R: Tensor, kind: Correction, low: float, high: float) -> Tensor:
    """Compute [R], the weights w(rho).

        none      1
        tis       min(rho, high)                          truncated importance sampling, Yao et al. 2025 (a)
        mis       rho where rho <= high, else 0           masked importance sampling, Liu, Li et al. 2025 (b)
        icepop    rho where low <= rho <= high, else 0    IcePop, arXiv 2510.18855 (c)

    Sources: (a) fengyao.notion.site/off-policy-rl; (b) yingru.notion.site, "When Speed Kills Stability"; (c) also
    ringtech.notion.site/icepop.

    Args:
        ratio_R: [R], rho.
        kind: which rule.
        low: the lower bound; 0 but for `icepop`.
        high: the upper bound.
    """
    if kind == "none":
        return torch.ones_like(ratio_R)
    if kind == "tis":
        return ratio_R.clamp(max=high)
    return torch.where((ratio_R >= low) & (ratio_R <= high), ratio_R, 0.0)


def accepted_sequences(
    logprobs_R: Tensor, engine_logprobs_R: Tensor, lengths_S: Tensor, kind: Rejection, low: float, high: float
) -> Tensor:
    """Choose bool [S], responses that are learned from; the others are left out as if they had not been sampled.

        sequence     low <= Π_t rho_t <= high
        geometric    low <= (Π_t rho_t)^(1/|y|) <= high, at any length alike

    Source: rejection on sequences in "When Speed Kills Stability", Liu, Li et al. 2025, and arXiv 2605.14220.
    """
    if kind == "none":
        return torch.ones(len(lengths_S), dtype=torch.bool)
    log_ratio_R = logprobs_R.double() - engine_logprobs_R.double()
    reduce = sequence_sum if kind == "sequence" else sequence_mean
    ratio_S = reduce(log_ratio_R, lengths_S).exp()
    return (ratio_S >= low) & (ratio_S <= high)


def kl_to_reference(logprobs_R: Tensor, reference_logprobs_R: Tensor) -> Tensor:
    """Compute [R], x - log x - 1 with x = π_ref(y_t) / π(y_t): at least 0, and 0 where the two agree. Differentiable.

    Its mean over tokens drawn from π estimates KL(π || π_ref). Source: GRPO, arXiv 2402.03300, equation 4; k3 of
    Schulman 2020 (joschu.net/blog/kl-approx.html).
    """
    log_x_R = reference_logprobs_R - logprobs_R
    return log_x_R.exp() - log_x_R - 1


def coefficients(lengths_S: Tensor, mean: Mean, max_length: int, dtype: torch.dtype) -> Tensor:
    """Compute [R], c_t, which the loss of each token is multiplied by.

        token       1         D = tokens of the mini-batch       DAPO, arXiv 2503.14476, equation 12
        sequence    1/|y_i|   D = sequences of the mini-batch    GRPO, arXiv 2402.03300, equation 3
        constant    1/L_max   D = sequences of the mini-batch    Dr. GRPO, arXiv 2503.20783, section 3.2

    Args:
        lengths_S: int64 [S], response tokens of each sequence.
        mean: which.
        max_length: L_max, the most tokens that a response may have.
        dtype: of the losses.
    """
    if mean == "sequence":
        return (1 / lengths_S.to(dtype)).repeat_interleave(lengths_S)
    value = 1.0 if mean == "token" else 1 / max_length
    return torch.full((int(lengths_S.sum()),), value, dtype=dtype, device=lengths_S.device)


def denominator(lengths_S: NDArray[np.int64], mean: Mean) -> int:
    """Compute the part of D that these sequences make up."""
    return int(lengths_S.sum()) if mean == "token" else len(lengths_S)


class Tokens(NamedTuple):
    """Response tokens of whole sequences, packed.

    Attributes:
        logprobs_R: [R], of the policy as it is now, differentiable.
        old_logprobs_R: [R], of the policy before the update, in the trainer.
        engine_logprobs_R: [R], of the rollout.
        reference_logprobs_R: [R], of the reference; None without one.
        advantages_R: [R].
        lengths_S: int64 [S].
    """

    logprobs_R: Tensor
    old_logprobs_R: Tensor
    engine_logprobs_R: Tensor
    reference_logprobs_R: Tensor | None
    advantages_R: Tensor
    lengths_S: Tensor


class TokenLosses(NamedTuple):
    """Losses of response tokens, and what clipping and correction did to them.

    Attributes:
        losses_R: [R], differentiable, the penalty of `kl_R` in it.
        clipped_R: bool [R], tokens whose update the clip bounds changed.
        log_ratio_R: float64 [R], log of trainer over engine, by the level of the correction.
        weights_R: [R], what the correction made of the ratio; 1 without one.
        cut_R: bool [R], tokens for which it is another than the ratio.
        kl_R: [R], differentiable; None without a reference.
    """

    losses_R: Tensor
    clipped_R: Tensor
    log_ratio_R: Tensor
    weights_R: Tensor
    cut_R: Tensor
    kl_R: Tensor | None


def token_losses(tokens: Tokens, config: RLConfig) -> TokenLosses:
    """w(rho) l(r, A) + kl_coefficient · kl, without coefficients of the mean.

    rho compares the policy before the update with the engine, since r takes over from there. In REINFORCE it compares
    the policy as it is now; without a correction its weight is r, which leaves out the engine's deviation alone.
    """
    now, old, lengths_S = tokens.logprobs_R, tokens.old_logprobs_R, tokens.lengths_S
    correction = config.correction
    behind = now if config.loss == "reinforce" else old
    ratio_R = engine_ratio(behind, tokens.engine_logprobs_R, lengths_S, correction.level)
    weights_R = correction_weights(ratio_R, correction.kind, correction.low or 0.0, correction.high or math.inf)
    losses_R, clipped_R = _surrogate(tokens, config)
    if config.loss == "reinforce" and correction.kind == "none":
        losses_R = losses_R * (now - old).detach().exp()
    elif correction.kind != "none":
        losses_R = losses_R * weights_R
    kl_R = None
    if tokens.reference_logprobs_R is not None:
        kl_R = kl_to_reference(now, tokens.reference_logprobs_R)
        losses_R = losses_R + config.kl_coefficient * kl_R
    cut_R = (weights_R != ratio_R) & (correction.kind != "none")
    log_ratio_R = engine_log_ratio(behind, tokens.engine_logprobs_R, lengths_S, correction.level)
    return TokenLosses(losses_R, clipped_R, log_ratio_R, weights_R, cut_R, kl_R)


def _surrogate(tokens: Tokens, config: RLConfig) -> Surrogate:
    now, advantages_R = tokens.logprobs_R, tokens.advantages_R
    log_ratio_R = policy_log_ratio(now, tokens.old_logprobs_R, tokens.lengths_S, config.ratio)
    if config.loss == "clip":
        return clipped_ratio(log_ratio_R, advantages_R, config.clip_low, config.clip_high)
    surrogate = cispo if config.loss == "cispo" else reinforce
    return surrogate(now, log_ratio_R, advantages_R, config.clip_low, config.clip_high)
