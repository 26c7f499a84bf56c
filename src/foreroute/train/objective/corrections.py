"""Weights that make up for an engine whose probabilities are not the trainer's.

Responses are drawn from the engine's policy μ and learned from as if they came from the trainer's π. With
rho = π(y_t) / μ(y_t) of a sampled token, or the product of those of a response, the gradient of a token is multiplied
by w(rho). Nothing is differentiated through a weight.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from foreroute.train.objective.ratios import Level, sequence_mean, sequence_sum

Correction = Literal["none", "tis", "mis", "icepop"]
Rejection = Literal["none", "sequence", "geometric"]


def engine_ratio(logprobs_R: Tensor, engine_logprobs_R: Tensor, lengths_S: Tensor, level: Level) -> Tensor:
    """[R] without gradient: rho of each token, or of its response (the product over its tokens)."""
    log_ratio_R = (logprobs_R - engine_logprobs_R).detach()
    if level == "token":
        return log_ratio_R.exp()
    return sequence_sum(log_ratio_R, lengths_S).exp().repeat_interleave(lengths_S)


def correction_weights(ratio_R: Tensor, kind: Correction, low: float, high: float) -> Tensor:
    """[R], w(rho).

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
    """Bool [S], responses that are learned from; the others are left out as if they had not been sampled.

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
