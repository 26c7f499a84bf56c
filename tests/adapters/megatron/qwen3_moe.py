"""Qwen3-MoE of transformers, and the same written down in any precision."""

import torch

from foreroute.adapters import hf

LAYERS, HIDDEN, HEADS, GROUPS, HEAD, EXPERTS, TOP_K, BASE, EPS = 3, 32, 4, 2, 16, 8, 2, 1e6, 1e-6
DENSE = (0,)


def of_transformers():
    """The first layer dense; norm weights are not one, so that a norm in the wrong place is seen."""
    model = hf.build_model(
        "qwen3_moe",
        seed=0,
        vocab_size=64,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=24,
        intermediate_size=48,
        mlp_only_layers=list(DENSE),
        norm_topk_prob=True,
        initializer_range=0.2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        rms_norm_eps=EPS,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return model


def written_down(weights, tokens_BT, ids_BTLK, dtype):
    """Log-probabilities [B, T - 1] of the next tokens, each token computed by the experts that it is told."""
    w = {name: weight.to(dtype) for name, weight in weights.items()}
    x = w["model.embed_tokens.weight"][tokens_BT]
    routed = 0
    for layer in range(LAYERS):
        of = {n.removeprefix(f"model.layers.{layer}."): v for n, v in w.items() if f".layers.{layer}." in n}
        x = x + _attend(_norm(x, of["input_layernorm.weight"]), of)
        hidden = _norm(x, of["post_attention_layernorm.weight"])
        if layer in DENSE:
            up = torch.cat([of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]])
            x = x + _expert(hidden, up, of["mlp.down_proj.weight"])
        else:
            x = x + _mixture(hidden, of, ids_BTLK[:, :, routed])
            routed += 1
    logits = _norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens_BT[:, 1:, None])[..., 0]


def _mixture(x, of, ids_BTK):
    gates_BTK = (x @ of["mlp.gate.weight"].T).gather(-1, ids_BTK).softmax(-1)
    of_each = [_expert(x, of["mlp.experts.gate_up_proj"][e], of["mlp.experts.down_proj"][e]) for e in range(EXPERTS)]
    every_BTEH = torch.stack(of_each, dim=2)
    chosen = every_BTEH.gather(2, ids_BTK[..., None].expand(*ids_BTK.shape, x.size(-1)))
    return (gates_BTK[..., None] * chosen).sum(2)


def _expert(x, gate_up, down):
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (gate * gate.sigmoid() * up) @ down.T


def _attend(x, of):
    q, k, v = ((x @ of[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, HEAD)).transpose(1, 2) for name in "qkv")
    q, k = (_turned(_norm(y, of[f"self_attn.{name}_norm.weight"])) for y, name in ((q, "q"), (k, "k")))
    k, v = (y.repeat_interleave(HEADS // GROUPS, dim=1) for y in (k, v))
    scores = q @ k.transpose(-1, -2) / HEAD**0.5
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(ahead, float("-inf")).softmax(-1) @ v
    return mixed.transpose(1, 2).flatten(2) @ of["self_attn.o_proj.weight"].T


def _turned(x):
    """Rotary embedding: half of a head turns with the other half."""
    frequency = BASE ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    angle = torch.arange(x.size(-2), dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
