"""Sizes of presets against the layers that transformers makes of the published configurations."""

import pytest
import torch

from foreroute.costs.presets import MODELS

OF_MODELS = {
    "qwen3-30b-a3b": ("qwen3_moe", {"num_hidden_layers": 1, "num_key_value_heads": 4, "head_dim": 128}),
    "qwen3-235b-a22b": (
        "qwen3_moe",
        {"num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128}
        | {"hidden_size": 4096, "moe_intermediate_size": 1536},
    ),
    "glm-4.5": (
        "glm4_moe",
        {"num_hidden_layers": 2, "head_dim": 128, "first_k_dense_replace": 1, "hidden_size": 5120}
        | {"moe_intermediate_size": 1536, "n_routed_experts": 160},
    ),
    "glm-4.5-air": ("glm4_moe", {"num_hidden_layers": 2, "head_dim": 128}),
    "qwen3-next-80b-a3b": ("qwen3_next", {"num_hidden_layers": 4}),
    "deepseek-v3": ("deepseek_v3", {"num_hidden_layers": 4}),
    "kimi-k2": ("deepseek_v3", {"num_hidden_layers": 4, "num_attention_heads": 64, "n_routed_experts": 384}),
}
"""The model's type, and what differs from the type's own defaults, which are those of a released model."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_preset_has_as_many_parameters_as_the_models_own_layers(name):
    """A mean layer of four where kinds alternate, else the last; routers, norms and convolutions left out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = OF_MODELS[name]
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **changes), trust_remote_code=False
        ).model.layers
    if name != "qwen3-next-80b-a3b":
        layers = layers[-1:]
    sizes = {"experts": 0, "dense": 0}
    for part, weight in layers.named_parameters():
        if "mlp.experts" in part:
            sizes["experts"] += weight.numel() / len(layers)
        elif weight.ndim == 2 and "mlp.gate." not in part and "shared_expert_gate" not in part:
            sizes["dense"] += weight.numel() / len(layers)
    model = MODELS[name]
    assert sizes == {"experts": model.num_experts * model.expert_parameters, "dense": model.dense_parameters}
