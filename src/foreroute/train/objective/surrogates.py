"""Losses of single tokens, whose gradient is the policy gradient."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

Loss = Literal["clip", "cispo", "reinforce"]


class Surrogate(NamedTuple):
    """Losses of response tokens.

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
