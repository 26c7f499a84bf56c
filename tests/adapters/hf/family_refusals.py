"""Families that attach refuses, and the reason it gives."""

import pytest
import torch
import transformers

from foreroute.adapters import hf
from foreroute.errors import AttachError
from tests.adapters.hf.families import MODELLING, SIZES, config_fields, skip_in_older

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def nllb_moe():
    stack = {"layers": 2, "sparse_step": 1, "ffn_dim": 48, "attention_heads": 4}
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in stack.items()}
    return transformers.NllbMoeForConditionalGeneration(
        transformers.NllbMoeConfig(vocab_size=50, d_model=32, num_experts=8, **sizes)
    )


def switch_transformers():
    """Its encoder alone: the class of its routers is refused, not only both stacks together."""
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2, "num_sparse_encoder_layers": 2}
    return transformers.SwitchTransformersEncoderModel(transformers.SwitchTransformersConfig(vocab_size=50, **sizes))


def doge():
    sizes = {"num_attention_heads": 4, "is_moe": True, "num_experts": 16, "num_experts_per_tok": 2}
    return transformers.DogeForCausalLM(transformers.DogeConfig(**SMALL, **sizes))


def vitpose_backbone():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_experts": 4}
    return transformers.VitPoseBackbone(
        transformers.VitPoseBackboneConfig(image_size=[32, 32], patch_size=[16, 16], part_features=8, **sizes)
    )


def inkling2_loop():
    config_class = transformers.CONFIG_MAPPING["inkling2_loop_text"]
    sizes = {"num_hidden_layers": 3, "loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 2}
    known = {name: value for name, value in SIZES.items() if name in config_fields(config_class)}
    return transformers.AutoModel.from_config(
        config_class(**known | sizes, n_layers_per_attn_res_block=1), trust_remote_code=False
    )


REFUSED = {build.__name__: build for build in (doge, inkling2_loop, nllb_moe, switch_transformers, vitpose_backbone)}


def refusal(name):
    """The reason without the place, as the documentation has it. Skips where an older transformers lacks the family."""
    if not (MODELLING / name).exists():
        skip_in_older(f"this transformers has no {name}")
    torch.manual_seed(0)
    with pytest.raises(AttachError) as refused:
        hf.attach(REFUSED[name]())
    return str(refused.value).partition("cannot be replayed: ")[2]
