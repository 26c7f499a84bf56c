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
from typing import NamedTuple

import torch
from torch import Tensor

from foreroute.errors import ReplayError
from foreroute.replay.rows import ReplayRows


class Forced(NamedTuple):
    """What the router's top-k returns in replay.

    Attributes:
        values_RK: [R, K], dense scores at the ids, differentiable.
        ids_RK: int64 [R, K], the experts that are executed.
        own_ids_RK: int64 [R, K], what the router picks by itself; None if it was not asked about every slot.
    """

    values_RK: Tensor
    ids_RK: Tensor
    own_ids_RK: Tensor | None


def forced_selection(
    choice_scores_RE: Tensor,
    dense_scores_RE: Tensor,
    rows: ReplayRows,
    layer: int,
    own_choice: Callable[[Tensor], Tensor],
) -> Forced:
    """What the router's own top-k would have returned had it picked the replayed experts.

    Slots without a route keep the router's own choice. Unless `rows.ask_all`, or compiled into a
    graph, it is asked about no other slot.

    Args:
        choice_scores_RE: [R, E], what the router selects by; masked entries allowed.
        dense_scores_RE: [R, E], the same scores before any masking; the gate weights come from here.
        rows: the experts to select.
        layer: the position of the router in `rows.ids_LRK`.
        own_choice: the router's selection, scores [Q, E] -> int64 ids [Q, K].

    Raises:
        ReplayError: when the router saw another number of rows than the batch has slots.
    """
    ids_RK = rows.ids_LRK[layer]
    if choice_scores_RE.shape[:-1] != ids_RK.shape[:-1]:
        raise ReplayError(
            f"the router selects for rows of shape {tuple(choice_scores_RE.shape[:-1])}, the replayed batch has "
            f"{tuple(ids_RK.shape[:-1])}; a router that sees only part of the batch cannot be replayed"
        )
    device = choice_scores_RE.device
    ids = ids_RK.to(device=device, dtype=torch.int64)
    own = None
    # which slots lack a route is data: a graph asks about all of them, so as to hold for any batch
    if rows.ask_all or torch.compiler.is_compiling():
        own = own_choice(choice_scores_RE.detach())
        ids = torch.where(rows.routed_R.to(device)[:, None], ids, own)
    elif rows.unrouted_Q is not None:
        unrouted_Q = rows.unrouted_Q.to(device)
        ids = ids.index_copy(0, unrouted_Q, own_choice(choice_scores_RE.detach()[unrouted_Q]))
    return Forced(dense_scores_RE.gather(-1, ids), ids, own)
