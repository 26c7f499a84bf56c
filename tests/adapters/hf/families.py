"""Every Mixture-of-Experts family of transformers as a tiny model."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as AUTO
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from foreroute.adapters.versions import PEERS

MODELLING = Path(transformers.__file__).parent / "models"

# One set of sizes for all. A configuration takes the fields that its class knows.
NAMES_OF = {
    100: "ngram_vocab_size_base",
    64: "max_position_embeddings max_seq_len",
    50: "vocab_size unpadded_vocab_size vocab_size_per_layer_input",
    48: "intermediate_size ffn_hidden_size dense_intermediate_size",
    32: "hidden_size d_model router_hidden_size moe_hidden_size",
    24: (
        "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
        "expert_ffn_hidden_size share_expert_dim"
    ),
    16: "q_lora_rank kv_lora_rank index_head_dim index_topk rel_extent mamba_d_head mamba_head_dim",
    8: (
        "head_dim num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim "
        "qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim o_lora_rank "
        "swa_head_dim ssm_state_size chunk_size rotary_dim index_block_size hc_lowrank "
        "make_ngram_vocab_size_divisible_by indexer_head_dim indexer_budget"
    ),
    4: (
        "num_attention_heads num_key_value_heads n_group linear_num_value_heads linear_num_heads n_heads "
        "swa_num_attention_heads mamba_n_heads mamba_num_heads d_rel index_kpool indexer_compress_ratio"
    ),
    3: "num_hidden_layers n_layers",
    2: (
        "eos_token_id num_experts_per_tok moe_k moe_topk moe_top_k top_k_experts topk_group index_n_heads "
        "linear_num_key_heads num_layers o_groups swa_num_key_value_heads zero_expert_num n_groups "
        "split_ngram_parts index_topk_blocks indexer_n_heads"
    ),
    1: "bos_token_id num_shared_experts n_shared_experts first_k_dense_replace indexer_kv_heads",
    0.3: "initializer_range",
    0: "pad_token_id hidden_size_per_layer_input",
}
SIZES = {name: size for size, names in NAMES_OF.items() for name in names.split()}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HALF_ROPE = {**ROPE, "partial_rotary_factor": 0.5}
GROUPED_SOFTMAX = {"topk_method": "group_limited_greedy"}

USUAL = (
    "afmoe aria axk1 axk2 bailing_hybrid cohere2_moe deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe "
    "flex_olmo glm4_moe glm4_moe_lite gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared "
    "hunyuan_v1_moe hy_v3 hy_v4 inkling inkling2 jetmoe kolibri1 laguna longcat_flash mellum minimax minimax_m2 "
    "mistral_large4 mixtral muse_spark olmoe phimoe qwen2_moe qwen3_5_moe qwen3_moe qwen3_next qwen3_vl_moe qwen4_exp "
    "sarvam_mla sarvam_moe solar_open"
)
"""Families whose configuration needs nothing besides `SIZES`."""
NEEDED = {
    "beam": DENSE_FIRST,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_ocr2": GROUPED_SOFTMAX | DENSE_FIRST,
    "deepseek_v2": GROUPED_SOFTMAX,
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe", "moe"]},
    "dots3_note": {"use_sliding_window": False},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [24, 24], "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    "flint": {"num_hidden_layers": 4},
    "gemma4": {"enable_moe_block": True},
    "glm4v_moe": {"head_dim": 32, "rope_parameters": {**HALF_ROPE, "mrope_section": [2, 3, 3]}},
    "glm5_next": {"qk_rope_head_dim": 0, "head_dim": 0} | DENSE_FIRST,
    "glm_moe_dsa": DENSE_FIRST,
    "hy_v4_vl": {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    "jamba": {"num_hidden_layers": 4, "mamba_d_state": 4},
    "kimi_linear": {"topk_group": 1, "n_group": 1} | DENSE_FIRST,
    "lara_mini": {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"], "num_dense_layers": 1},
    "llama4": {"num_experts_per_tok": 1},
    "mimo_v2_flash": {
        "num_key_value_heads": 2,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), HALF_ROPE),
    },
    "minimax_m3_vl": {"shared_intermediate_size": 24},
    "mistral4": {"head_dim": None},
    "nemotron_h": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "moe", "attention", "moe"]},
    "step3p7": {"sliding_window": 16} | DENSE_FIRST,
    "unlimited_ocr": GROUPED_SOFTMAX,
    "zaya": {"num_experts_per_tok": 1},
}
"""What the configurations of others need besides; None leaves a field out."""
OF_TEXT = {
    "deepseek_ocr2": "DeepseekOcr2TextModel",
    "diffusion_gemma": "DiffusionGemmaEncoderTextModel",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeTextModel",
    "mistral4": "Mistral4ForCausalLM",
    "openai_privacy_filter": "OpenAIPrivacyFilterForTokenClassification",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextModel",
    "step3p7": "Step3p7TextModel",
    "unlimited_ocr": "UnlimitedOcrTextModel",
}
"""Classes of families that have neither a causal language model nor a model of text by a name of their own."""
MODELLED_BY = {"sarvam_mla": "deepseek_v3", "sarvam_moe": "glm4_moe"}
"""Families of which transformers has a configuration alone, and whose classes they have."""


def class_of(name):
    causal = AUTO.get(f"{name}_text") or AUTO.get(MODELLED_BY.get(name, name))
    return OF_TEXT.get(name) or causal or MODEL_MAPPING_NAMES.get(f"{name}_text", "")


FAMILIES = {name: class_of(name) for name in sorted({*USUAL.split(), *NEEDED, *OF_TEXT})}
"""By family, the class that is built, in `transformers.models.<family>.modeling_<family>`."""

OF_TOKENS = ("axk2", "deepseek_v32", "dots3_note", "hy_v4", "hy_v4_vl", "mistral_large4")
# What makes indexers leave something out of short sequences.
SPARSE = {
    **{name: {"index_topk": 6} for name in OF_TOKENS},
    "glm_moe_dsa": {"index_topk": 6, "indexer_types": ["full", "shared", "full"]},
    "deepseek_v4": {"index_topk": 3, "layer_types": ["compressed_sparse_attention"] * 3},
    "glm5_next": {
        "index_topk": 8,
        "layer_types": ["indexed_attention"] * 3,
        "indexer_types": ["full", "shared", "full"],
    },
    "minimax_m3_vl": {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]},
    "qwen4_exp": {"layer_types": ["linear_attention", "indexed_attention", "indexed_attention"]},
}

BY_ROUTER = "aria deepseek_ocr2 deepseek_v2 granitemoe granitemoehybrid granitemoeshared jamba lfm2_moe"
"""Families that older releases have without a router that is a module, or a selection by index."""


def lacks(name):
    """Why the installed transformers has nothing to replay in a family, as older releases do; None where it has."""
    if not (MODELLING / name / f"configuration_{name}.py").exists():
        return f"this transformers has no {name}"
    has_router = name not in BY_ROUTER.split() or re.search(
        r"class \w+Top[Kk]Router\(", modelling_file(name).read_text()
    )
    return None if has_router else f"{name} of this transformers has no router that is a module"


def modelling_file(name):
    by = MODELLED_BY.get(name, name)
    return MODELLING / by / f"modeling_{by}.py"


def skip_where_lacking(name):
    if why := lacks(name):
        skip_in_older(why)


def skip_where_nothing_is_spread():
    if "ep_implementation" not in inspect.signature(transformers.distributed.DistributedConfig).parameters:
        skip_in_older("this transformers has no registry of expert parallelism")


def skip_in_older(why):
    """Skip a test of what only an older transformers than the tested one may lack."""
    assert transformers.__version__ != PEERS["transformers"].newest, why
    pytest.skip(why)


def build(name, *, experts="eager", dtype=torch.float32, seed=0, sizes=SIZES, **overrides):
    """The tiny model of a family, in eval mode; `overrides` replace fields. Skips where transformers lacks it."""
    skip_where_lacking(name)
    by = MODELLED_BY.get(name, name)
    model_class = getattr(importlib.import_module(f"transformers.models.{by}.modeling_{by}"), FAMILIES[name])
    config_class = transformers.CONFIG_MAPPING[name] if name in MODELLED_BY else model_class.config_class
    known = config_fields(config_class) | {"head_dim"}  # read by modelling code, often not declared
    given = {field: value for field, value in sizes.items() if field in known} | NEEDED.get(name, {}) | overrides
    config = config_class(**{field: value for field, value in given.items() if value is not None})
    config._experts_implementation = experts
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(dtype).eval()
        return with_live_values(model)


def config_fields(config_class):
    declared = {field for each in config_class.__mro__ for field in getattr(each, "__annotations__", {})}
    return declared | inspect.signature(config_class.__init__).parameters.keys()


def with_live_values(model):
    """Gates, selection biases and hash tables that start as zeros, filled in, so that they can make a difference."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):
                tensor.copy_(torch.rand(len(tensor), model.config.n_routed_experts).argsort(-1)[:, : tensor.shape[1]])
            elif name.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.normal_(0, 0.1)
            elif name.endswith("per_expert_scale"):
                tensor.uniform_(0.5, 1.5)
            elif tensor.is_floating_point() and tensor.ndim > 1 and not tensor.any():
                tensor.normal_(0, SIZES["initializer_range"])
    return model
