"""Reading ids out of what a router hands on, for routers that regroup their picks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def grouped_by_expert(output: Any) -> Tensor:
    """JetMoE: picks sorted by expert, and how many each expert has.

    Args:
        output: (order of the picks, token of each pick, gates, number of picks of each expert, logits).

    Returns:
        int64 [R, K], the ids of each token in ascending order.
    """
    _, token_of_pick, _, picks_of_expert, logits_RE = output
    experts = torch.arange(len(picks_of_expert)).repeat_interleave(torch.tensor(picks_of_expert))
    by_token = experts[token_of_pick.cpu().sort(stable=True).indices]
    return by_token.view(len(logits_RE), -1)
