"""What the patches are tried on: a tiny policy, and an engine of it that routes otherwise."""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.trainers.given_experts import watched


def tiny(seed=0, vocab_size=64):
    """Eight experts, two of them for each token, in three layers."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_experts": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts_per_tok": 2}
    more = {"initializer_range": 0.2, "norm_topk_prob": True, "pad_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=vocab_size, tie_word_embeddings=False, **sizes, **heads, **more)
    )


@torch.no_grad()
def put_off(engine, noise=0.05):
    """Make the routers of an engine, a copy of the policy, a little off."""
    generator = torch.Generator().manual_seed(0)
    for router in (m for m in engine.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"):
        router.weight.data += noise * torch.randn(router.weight.shape, generator=generator).to(router.weight.dtype)
    return engine


@torch.no_grad()
def routed_by(engine, sequences):
    """Routes [T - 1, L, K] of each sequence by an engine, which is put off."""
    with watched(put_off(engine)) as forwards:
        for tokens in sequences:
            engine(input_ids=torch.tensor([tokens[:-1]]), use_cache=False)
    return [torch.from_numpy(forward.ids_LRK().transpose(1, 0, 2)) for forward in forwards]


def require_followed(found, rows, replays, disagreement):
    """Of (rows, those that went to other experts): all rows are followed, or without replay, the control, too few."""
    assert found[0] == rows
    if replays:
        assert found[1] == 0
        assert 0.02 < disagreement < 0.6
    else:
        assert found[1] > 0.02 * rows
        assert disagreement is None
