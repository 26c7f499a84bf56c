"""Sizes of a model that trains in seconds, for benchmarks and tests, and whether two runs ended with the same bits."""

from __future__ import annotations

from typing import Any

import torch

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}


def same_state(a: Any, b: Any) -> bool:
    """Whether states of trainers, such as checkpoints hold, are the same to the bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_state, a, b))
    return bool(a == b)
