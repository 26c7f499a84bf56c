"""Tiny models, one of each kind of gate, and roundings by shape that a processor may lack."""

import torch

from foreroute.adapters import hf

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}

FAMILIES = {
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
# softmax, selection limited to groups by zeroing the scores of the others: the trap of gathering from zeroed scores
GROUPED = {
    "deepseek_v2": {
        **{k: v for k, v in FAMILIES["deepseek_v3"].items() if k != "num_local_experts"},
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
    },
}


def tiny(family, *, seed=0, experts="eager"):
    return hf.build_model(family, seed=seed, experts_implementation=experts, **{**FAMILIES, **GROUPED}[family])


def round_by_shape(model):
    """Move what the second norm of every layer gives by a unit of bfloat16, up or down according to the number of rows.

    Kernels of some processors round otherwise for another number of rows, and those of others do not.
    """

    def moved(module, args, output):
        generator = torch.Generator().manual_seed(output.shape[:-1].numel())
        signs = torch.randint(0, 2, output.shape[-1:], generator=generator) * 2 - 1
        return (output * (1 + signs * torch.finfo(torch.bfloat16).eps)).to(output.dtype)

    for name, module in model.named_modules():
        if name.endswith("post_attention_layernorm"):
            module.register_forward_hook(moved)
    return model
