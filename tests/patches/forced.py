"""The oracle of the patches: what experts were really given.

Nothing here asks foreroute.
"""

from contextlib import contextmanager

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def tiny(seed=0, vocab_size=64):
    """Eight experts, two of them for each token, in three layers."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_experts": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts_per_tok": 2}
    more = {"initializer_range": 0.2, "norm_topk_prob": True, "pad_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=vocab_size, tie_word_embeddings=False, **sizes, **heads, **more)
    )


@contextmanager
def watched(model):
    """Every forward with gradients: a list that gets [N, K] of each call of experts, layer after layer."""
    given = []
    all_experts = [m for m in model.modules() if type(m).__name__ == "Qwen3MoeExperts"]
    handles = [
        experts.register_forward_pre_hook(lambda _, args: given.append(args[1].detach().clone()))
        for experts in all_experts
    ]
    yield given
    for handle in handles:
        handle.remove()


def differing(given, routes_BTLK, mask_BT):
    """How many rows experts were given, of those with a route, and how many of them went to other sets.

    Args:
        given: [N, K] of each layer, in one forward or several.
        routes_BTLK: -1 where there is no route.
    """
    rows = others = 0
    layers = routes_BTLK.shape[2]
    assert given
    assert len(given) % layers == 0
    for call, ids in enumerate(given):
        wanted = routes_BTLK[:, :, call % layers].flatten(0, 1).long()
        known = (wanted >= 0).all(-1) & mask_BT.flatten().bool()
        rows += int(known.sum())
        others += int((ids[known].sort(-1).values != wanted[known].sort(-1).values).any(-1).sum())
    return rows, others


@torch.no_grad()
def routed_by(engine, sequences, noise=0.05):
    """Routes [T - 1, L, K] of each sequence by an engine, a copy of the policy whose routers are made a little off."""
    generator = torch.Generator().manual_seed(0)
    for router in (m for m in engine.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"):
        router.weight.data += noise * torch.randn(router.weight.shape, generator=generator).to(router.weight.dtype)
    routes = []
    for tokens in sequences:
        with watched(engine) as given:
            engine(input_ids=torch.tensor([tokens[:-1]]), use_cache=False)
        routes.append(torch.stack(given, 1))
    return routes
