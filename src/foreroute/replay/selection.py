"""The selection of a router, forced to given experts.

Only the selection is replaced. A router computes scores, selects K experts, and turns the scores of the selected ones
into gate weights; whatever its own rule is (softmax before or after selection, sigmoid with a bias that only steers
selection, renormalisation, scaling), it is evaluated at the forced experts, on live scores, with live gradients:

    g_i = exp(s_i) / sum_{j in I} exp(s_j)   for i in the replayed set I, else 0

for the softmax family (Rollout Routing Replay, arXiv 2510.11370, section 4.1). The scores are gathered from the dense
scores, never from scores that were already zeroed outside the router's own choice: an expert that the live router would
not have picked keeps its weight and its gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foreroute.errors import ReplayError


def forced_selection(
    choice_scores_RE: Tensor,
    dense_scores_RE: Tensor,
    ids_RK: Tensor,
    unrouted_Q: Tensor | None,
    own_choice: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """What the router's own top-k would have returned had it picked the given experts.

    Args:
        choice_scores_RE: [R, E], what the router selects by; masked entries allowed.
        dense_scores_RE: [R, E], the same scores before any masking; the gate weights come from here.
        ids_RK: integers [R, K], the experts to select.
        unrouted_Q: int64 [Q], rows for which the router keeps its own choice, or None.
        own_choice: the router's selection, scores [Q, E] -> int64 ids [Q, K].

    Returns:
        Scores [R, K] at the selected experts, differentiable, and their ids, int64 [R, K].

    Raises:
        ReplayError: when the router saw another number of rows than the batch has slots.
    """
    if choice_scores_RE.shape[:-1] != ids_RK.shape[:-1]:
        raise ReplayError(
            f"the router selects for rows of shape {tuple(choice_scores_RE.shape[:-1])}, the replayed batch has "
            f"{tuple(ids_RK.shape[:-1])}; a router that sees only part of the batch cannot be replayed"
        )
    ids = ids_RK.to(device=choice_scores_RE.device, dtype=torch.int64)
    if unrouted_Q is not None:
        ids = ids.index_copy(0, unrouted_Q, own_choice(choice_scores_RE.detach()[unrouted_Q]))
    return dense_scores_RE.gather(-1, ids), ids
