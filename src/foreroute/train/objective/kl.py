"""The distance to a reference policy, as a penalty."""

from __future__ import annotations

from torch import Tensor


def kl_to_reference(logprobs_R: Tensor, reference_logprobs_R: Tensor) -> Tensor:
    """[R], x - log x - 1 with x = π_ref(y_t) / π(y_t), differentiable: at least 0, and 0 where the two agree.

    Its mean over tokens drawn from π estimates KL(π || π_ref). Source: GRPO, arXiv 2402.03300, equation 4; k3 of
    Schulman 2020 (joschu.net/blog/kl-approx.html).
    """
    log_x_R = reference_logprobs_R - logprobs_R
    return log_x_R.exp() - log_x_R - 1
