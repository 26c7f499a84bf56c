"""The loss of every token of whole sequences, put together as the configuration says."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from foreroute.train.config.rl import RLConfig
from foreroute.train.objective.corrections import correction_weights, engine_ratio
from foreroute.train.objective.kl import kl_to_reference
from foreroute.train.objective.ratios import policy_log_ratio
from foreroute.train.objective.surrogates import Surrogate, cispo, clipped_ratio, reinforce


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
    """What the tokens cost.

    Attributes:
        losses_R: [R], differentiable, the penalty of `kl_R` in it.
        clipped_R: bool [R], tokens whose update the clip bounds changed.
        ratio_R: [R], trainer over engine, by the level of the correction.
        weights_R: [R], what the correction made of it; 1 without one.
        cut_R: bool [R], tokens for which it is another than the ratio.
        kl_R: [R], differentiable; None without a reference.
    """

    losses_R: Tensor
    clipped_R: Tensor
    ratio_R: Tensor
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
    return TokenLosses(losses_R, clipped_R, ratio_R, weights_R, cut_R, kl_R)


def _surrogate(tokens: Tokens, config: RLConfig) -> Surrogate:
    now, advantages_R = tokens.logprobs_R, tokens.advantages_R
    log_ratio_R = policy_log_ratio(now, tokens.old_logprobs_R, tokens.lengths_S, config.ratio)
    if config.loss == "clip":
        return clipped_ratio(log_ratio_R, advantages_R, config.clip_low, config.clip_high)
    surrogate = cispo if config.loss == "cispo" else reinforce
    return surrogate(now, log_ratio_R, advantages_R, config.clip_low, config.clip_high)
