"""Logarithms of probability ratios, of single tokens and of whole responses."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence"]


def sequence_sum(values_R: Tensor, lengths_S: Tensor) -> Tensor:
    """[S], the sum over each sequence."""
    number_R = torch.repeat_interleave(torch.arange(len(lengths_S), device=values_R.device), lengths_S)
    return values_R.new_zeros(len(lengths_S)).index_add(0, number_R, values_R)


def sequence_mean(values_R: Tensor, lengths_S: Tensor) -> Tensor:
    """[S], the mean over each sequence."""
    return sequence_sum(values_R, lengths_S) / lengths_S


def policy_log_ratio(logprobs_R: Tensor, old_logprobs_R: Tensor, lengths_S: Tensor, level: Level) -> Tensor:
    """[R], log of how much more probable a token is now than before the update; differentiable.

    token       log r_t = log π(y_t) - log π_old(y_t)                          PPO, arXiv 1707.06347, section 3
    sequence    log s_i = 1/|y_i| Σ_t log r_t, for every token of response i    GSPO, arXiv 2507.18071, equation 7
    """
    log_ratio_R = logprobs_R - old_logprobs_R
    if level == "token":
        return log_ratio_R
    return sequence_mean(log_ratio_R, lengths_S).repeat_interleave(lengths_S)
