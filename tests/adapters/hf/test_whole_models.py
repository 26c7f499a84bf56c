"""Vision-language models attached as a whole: the forward that gets the tokens is not that of the text model."""

import importlib

import torch

from foreroute.adapters import hf
from tests.adapters.hf.families import build, config_fields, with_live_values
from tests.adapters.hf.family_checks import require_bit_equal
from tests.tiers import grid

WHOLE = {
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "hy_v4_vl": "HYV4VLForConditionalGeneration",
    "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "step3p7": "Step3p7ForConditionalGeneration",
}
NAMES_OF = {
    1: "depth num_hidden_layers num_layers encoder_layers",
    32: (
        "hidden_size out_hidden_size d_model embed_dim vision_output_dim intermediate_size encoder_ffn_dim "
        "projector_input_dim projector_output_dim"
    ),
    4: "num_heads num_attention_heads num_key_value_heads encoder_attention_heads",
    8: "head_dim",
}
TOWER = {name: size for size, names in NAMES_OF.items() for name in names.split()} | {"deepstack_visual_indexes": [0]}


def build_whole(name, **overrides):
    text_config = build(name).config.to_dict()
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    model_class = getattr(module, WHOLE[name])
    parts = {
        part: {field: value for field, value in TOWER.items() if field in config_fields(sub_class)}
        for part, sub_class in model_class.config_class.sub_configs.items()
        if part != "text_config"
    }
    config = model_class.config_class(**parts, text_config=text_config, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return with_live_values(model_class(config).eval())


@grid("name", WHOLE, quick=3)
def test_a_whole_model_replays_its_own_text_routes_bit_for_bit(name):
    model = build_whole(name)
    require_bit_equal(build_whole(name), model, hf.attach(model))
