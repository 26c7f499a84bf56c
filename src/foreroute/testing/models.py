"""Tiny models, one of each kind of gate, the comparison of their bits, and roundings that a processor may lack."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from foreroute.adapters import hf

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
"""Sizes that families share. Weights are drawn wide, so that no two experts are nearly tied."""

FAMILIES: dict[str, dict[str, Any]] = {
    # softmax over all experts, then selection, renormalised
    "qwen3_moe": {
        **SMALL,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    # softmax over all experts, then selection, as it is
    "olmoe": {**SMALL, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "mixtral": {**SMALL, "num_local_experts": 8, "num_experts_per_tok": 2},
    # selection of logits with a bias, softmax over the selected
    "gpt_oss": {**SMALL, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3},
    # sigmoid, selection steered by a bias and limited to groups, renormalised, scaled; first layer dense
    "deepseek_v3": {
        **SMALL,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
}
"""Sizes by `model_type`: one family for each kind of gate."""
# softmax, selection limited to groups by zeroing the scores of the others: the trap of gathering from zeroed scores
GROUPED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **{key: value for key, value in FAMILIES["deepseek_v3"].items() if key != "num_local_experts"},
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
    },
}


def tiny(family: str = "qwen3_moe", *, seed: int = 0, experts: str = "eager", **sizes: Any) -> nn.Module:
    """A model of three layers and eight experts, in float32 on the CPU.

    Args:
        family: a `model_type` of `FAMILIES` or `GROUPED`.
        seed: of its weights.
        experts: the implementation of the experts, as transformers names them.
        sizes: of the configuration, in place of those that the family has.
    """
    known = {**FAMILIES, **GROUPED}
    model: nn.Module = hf.build_model(family, seed=seed, experts_implementation=experts, **{**known[family], **sizes})
    return model


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors have one type, shape and bits. Zeros of either sign differ, equal NaNs do not."""
    return one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8)
