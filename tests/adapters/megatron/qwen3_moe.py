"""Qwen3-MoE three times: of transformers, of Megatron with the same weights, and written down in any precision."""

import torch

from foreroute.adapters import hf
from tests.adapters.megatron.grid import Cell
from tests.adapters.megatron.model_chunks import build, initialize

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


def of_megatron(weights):
    settings = {
        "normalization": "RMSNorm",
        "layernorm_epsilon": EPS,
        "qk_layernorm": True,
        "kv_channels": HEAD,
        "num_query_groups": GROUPS,
        "ffn_hidden_size": 48,
        "moe_ffn_hidden_size": 24,
        "moe_layer_freq": [int(layer not in DENSE) for layer in range(LAYERS)],
    }
    initialize(Cell())
    [model] = build(Cell(layers=LAYERS, settings=tuple(settings.items())), rotary_base=BASE)
    model.load_state_dict(converted(weights))
    return model


def converted(weights):
    named = {
        "embedding.word_embeddings.weight": weights["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        "output_layer.weight": weights["lm_head.weight"],
    }
    for layer in range(LAYERS):
        of = {n.removeprefix(f"model.layers.{layer}."): w for n, w in weights.items() if f".layers.{layer}." in n}
        parts = {**_attention(of), **(_dense(of) if layer in DENSE else _experts(of))}
        named.update({f"decoder.layers.{layer}.{name}": weight for name, weight in parts.items()})
    return named


def _attention(of):
    q, k, v = (of[f"self_attn.{name}_proj.weight"].view(GROUPS, -1, HIDDEN) for name in "qkv")
    return {
        "input_layernorm.weight": of["input_layernorm.weight"],
        # for each group its queries, its key and its value
        "self_attention.linear_qkv.weight": torch.cat([q, k, v], dim=1).reshape(-1, HIDDEN),
        "self_attention.q_layernorm.weight": of["self_attn.q_norm.weight"],
        "self_attention.k_layernorm.weight": of["self_attn.k_norm.weight"],
        "self_attention.linear_proj.weight": of["self_attn.o_proj.weight"],
        "pre_mlp_layernorm.weight": of["post_attention_layernorm.weight"],
    }


def _dense(of):
    return {
        "mlp.linear_fc1.weight": torch.cat([of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]]),
        "mlp.linear_fc2.weight": of["mlp.down_proj.weight"],
    }


def _experts(of):
    named = {"mlp.router.weight": of["mlp.gate.weight"]}
    for e in range(EXPERTS):
        named[f"mlp.experts.local_experts.{e}.linear_fc1.weight"] = of["mlp.experts.gate_up_proj"][e]
        named[f"mlp.experts.local_experts.{e}.linear_fc2.weight"] = of["mlp.experts.down_proj"][e]
    return named


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
