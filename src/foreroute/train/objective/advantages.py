"""From rewards to advantages: how much better a response is than the others of its prompt."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Advantage = Literal["group_std", "group_mean"]
"""Reward minus the group's mean, over its standard deviation ("group_std") or as it is ("group_mean")."""


def group_advantages(
    rewards_S: NDArray[np.float64], group_size: int, kind: Advantage = "group_std"
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Advantages within groups, and which groups teach anything.

        group_std    A_i = (R_i - mean R) / std R       GRPO, arXiv 2402.03300, section 4.1.2
        group_mean   A_i = R_i - mean R                 Dr. GRPO, arXiv 2503.20783, section 3.2; MiniRL, 2512.01374

    The mean and the (population) standard deviation are those of the `group_size` rewards of one prompt.

    Returns:
        float64 [S], exactly 0 in a group whose rewards are all equal, or of which one is missing (NaN); and bool [S],
        False there.
    """
    groups = rewards_S.reshape(-1, group_size)
    complete = ~np.isnan(groups).any(axis=1, keepdims=True)
    differs = complete & (groups != groups[:, :1]).any(axis=1, keepdims=True)
    centred = groups - groups.mean(axis=1, keepdims=True)
    scale = np.where(differs, groups.std(axis=1, keepdims=True), 1.0) if kind == "group_std" else 1.0
    advantages = np.where(differs, centred / scale, 0.0)
    return advantages.reshape(-1), np.broadcast_to(differs, groups.shape).reshape(-1)
