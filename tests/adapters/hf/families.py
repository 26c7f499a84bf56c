"""Every Mixture-of-Experts family of transformers as a tiny model."""

import importlib
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foreroute.adapters.versions import PEERS

MODELLING = Path(transformers.__file__).parent / "models"

# One set of sizes for all. A configuration takes the fields that its class knows.
NAMES_OF = {
    50: "vocab_size unpadded_vocab_size",
    32: "hidden_size",
    48: "intermediate_size",
    3: "num_hidden_layers",
    4: "num_attention_heads num_key_value_heads n_group linear_num_value_heads linear_num_heads",
    8: (
        "head_dim num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim "
        "qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim"
    ),
    0.3: "initializer_range",
    64: "max_position_embeddings",
    0: "pad_token_id",
    1: "bos_token_id num_shared_experts n_shared_experts first_k_dense_replace",
    2: (
        "eos_token_id num_experts_per_tok moe_k moe_topk moe_top_k top_k_experts topk_group index_n_heads "
        "linear_num_key_heads"
    ),
    24: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    16: "q_lora_rank kv_lora_rank index_head_dim index_topk",
}
SIZES = {name: size for size, names in NAMES_OF.items() for name in names.split()}
ALWAYS = {"head_dim"}  # read by modelling code, often not declared
DENSE_FIRST = ["dense", "sparse", "sparse"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GROUPED_SOFTMAX = {"topk_method": "group_limited_greedy"}
SLIDING_HEADS = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8}


@dataclass(frozen=True)
class Family:
    """One tiny model.

    Attributes:
        model: the class to build, in `transformers.models.<family>.modeling_<family>`.
        sizes: what its configuration needs besides `SIZES`; None leaves a field out.
        modelled_by: the family whose class it is, where transformers has a configuration of this one alone.
    """

    model: str
    sizes: dict[str, Any] = field(default_factory=dict)
    modelled_by: str | None = None


USUAL = (
    "afmoe axk1 axk2 bailing_hybrid cohere2_moe deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe "
    "flex_olmo glm4_moe glm4_moe_lite gpt_oss granitemoe granitemoe_swa granitemoeshared hunyuan_v1_moe "
    "hy_v3 hy_v4 jetmoe kolibri1 laguna mellum minimax minimax_m2 mixtral olmoe qwen2_moe qwen3_5_moe "
    "qwen3_moe qwen3_next solar_open"
)
"""Families whose causal language model needs nothing besides `SIZES`."""
OTHERS = {
    "aria": Family("AriaTextForCausalLM"),
    "beam": Family("BeamForCausalLM", {"mlp_layer_types": DENSE_FIRST}),
    "dbrx": Family(
        "DbrxForCausalLM",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2},
        },
    ),
    "deepseek_ocr2": Family("DeepseekOcr2TextModel", {**GROUPED_SOFTMAX, "mlp_layer_types": DENSE_FIRST}),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", GROUPED_SOFTMAX),
    "deepseek_v4": Family(
        "DeepseekV4ForCausalLM", {"mlp_layer_types": ["hash_moe", "moe", "moe"], "o_groups": 2, "o_lora_rank": 8}
    ),
    "diffusion_gemma": Family("DiffusionGemmaEncoderTextModel"),
    "dots3_note": Family("Dots3NoteForCausalLM", {"use_sliding_window": False}),
    "ernie4_5_vl_moe": Family(
        "Ernie4_5_VLMoeTextModel",
        {"moe_intermediate_size": [24, 24], "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
    ),
    "flint": Family("FlintForCausalLM", {"num_hidden_layers": 4}),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        {"enable_moe_block": True, "vocab_size_per_layer_input": 50, "hidden_size_per_layer_input": 0},
    ),
    "glm4v_moe": Family(
        "Glm4vMoeTextModel",
        {"head_dim": 32, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}},
    ),
    "glm5_next": Family(
        "Glm5NextTextModel", {"index_kpool": 4, "qk_rope_head_dim": 0, "head_dim": 0, "mlp_layer_types": DENSE_FIRST}
    ),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", {"mlp_layer_types": DENSE_FIRST}),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", {"mamba_n_heads": 4, "mamba_d_head": 16}),
    "hy_v4_vl": Family("HYV4VLTextModel", {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}),
    "inkling": Family("InklingForCausalLM", {**SLIDING_HEADS, "rel_extent": 16, "d_rel": 4}),
    "inkling2": Family("Inkling2ForCausalLM", {**SLIDING_HEADS, "rel_extent": 16, "d_rel": 4}),
    "jamba": Family("JambaForCausalLM", {"num_hidden_layers": 4, "mamba_d_state": 4}),
    "kimi_linear": Family("KimiLinearForCausalLM", {"mlp_layer_types": DENSE_FIRST, "topk_group": 1, "n_group": 1}),
    "lara_mini": Family(
        "LaraMiniForCausalLM", {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}
    ),
    "lfm2_moe": Family(
        "Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention", "full_attention"], "num_dense_layers": 1}
    ),
    "llama4": Family("Llama4ForCausalLM", {"num_experts_per_tok": 1}),
    "longcat_flash": Family(
        "LongcatFlashForCausalLM",
        {"num_layers": 2, "zero_expert_num": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24},
    ),
    "mimo_v2_flash": Family(
        "MiMoV2FlashForCausalLM",
        {
            "num_key_value_heads": 2,
            "rope_parameters": {
                kind: {**ROPE, "partial_rotary_factor": 0.5} for kind in ("full_attention", "sliding_attention")
            },
        },
    ),
    "minimax_m3_vl": Family(
        "MiniMaxM3VLForCausalLM",
        {
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 24,
            "rotary_dim": 8,
            "index_block_size": 8,
            "index_topk_blocks": 2,
        },
    ),
    "mistral4": Family("Mistral4ForCausalLM", {"head_dim": None}),
    "mistral_large4": Family("MistralLarge4TextModel"),
    "muse_spark": Family("MuseSparkTextModel", {"moe_hidden_size": 32}),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "openai_privacy_filter": Family("OpenAIPrivacyFilterForTokenClassification"),
    "phimoe": Family("PhimoeForCausalLM", {"input_jitter_noise": 0.0}),
    "qwen3_omni_moe": Family("Qwen3OmniMoeThinkerTextModel"),
    "qwen3_vl_moe": Family("Qwen3VLMoeTextModel"),
    "qwen4_exp": Family(
        "Qwen4ExpForCausalLM",
        {
            "hc_lowrank": 8,
            "ngram_vocab_size_base": 100,
            "make_ngram_vocab_size_divisible_by": 8,
            "split_ngram_parts": 2,
        },
    ),
    "sarvam_mla": Family("DeepseekV3ForCausalLM", modelled_by="deepseek_v3"),
    "sarvam_moe": Family("Glm4MoeForCausalLM", modelled_by="glm4_moe"),
    "step3p7": Family(
        "Step3p7TextModel", {"mlp_layer_types": DENSE_FIRST, "share_expert_dim": 24, "sliding_window": 16}
    ),
    "unlimited_ocr": Family("UnlimitedOcrTextModel", GROUPED_SOFTMAX),
    "zaya": Family("ZayaForCausalLM", {"num_experts_per_tok": 1, "router_hidden_size": 32}),
}
FAMILIES = {name: Family(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name, "")) for name in USUAL.split()} | OTHERS
FAMILIES = dict(sorted(FAMILIES.items()))

# What makes indexers leave something out of short sequences.
SPARSE = {
    "axk2": {"index_topk": 6},
    "deepseek_v32": {"index_topk": 6},
    "dots3_note": {"index_topk": 6},
    "glm_moe_dsa": {"index_topk": 6, "indexer_types": ["full", "shared", "full"]},
    "hy_v4": {"index_topk": 6},
    "hy_v4_vl": {"index_topk": 6},
    "mistral_large4": {"index_topk": 6},
    "deepseek_v4": {"index_topk": 3, "layer_types": ["compressed_sparse_attention"] * 3},
    "glm5_next": {
        "index_topk": 8,
        "layer_types": ["indexed_attention"] * 3,
        "indexer_types": ["full", "shared", "full"],
    },
    "minimax_m3_vl": {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]},
    "qwen4_exp": {
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
}

# What makes families replayable, as their code says it: a router that is a module, or a selection by index.
REPLAYABLE_WITH = {
    "aria": "class AriaTextTopKRouter(",
    "deepseek_ocr2": "class DeepseekOcr2TextTopkRouter(",
    "deepseek_v2": "class DeepseekV2TopkRouter(",
    "granitemoe": "class GraniteMoeTopKRouter(",
    "granitemoehybrid": "class GraniteMoeHybridTopKRouter(",
    "granitemoeshared": "class GraniteMoeSharedTopKRouter(",
    "jamba": "class JambaTopKRouter(",
    "lfm2_moe": "class Lfm2MoeTopKRouter(",
}


def lacks(name):
    """Why the installed transformers has nothing to replay in a family, as older releases do; None where it has."""
    if not (MODELLING / name / f"configuration_{name}.py").exists():
        return f"this transformers has no {name}"
    needed = REPLAYABLE_WITH.get(name, "")
    return None if needed in modelling_file(name).read_text() else f"{name} of this transformers has no {needed!r}"


def modelling_file(name):
    by = FAMILIES[name].modelled_by or name
    return MODELLING / by / f"modeling_{by}.py"


def skip_where_lacking(name):
    why = lacks(name)
    if why is not None:
        skip_in_older(why)


def skip_where_nothing_is_spread():
    if "ep_implementation" not in inspect.signature(transformers.distributed.DistributedConfig).parameters:
        skip_in_older("this transformers has no registry of expert parallelism")


def skip_in_older(why):
    """Skip a test of what only an older transformers than the tested one may lack."""
    assert transformers.__version__ != PEERS["transformers"].newest, why
    pytest.skip(why)


def build(name, *, experts="eager", dtype=torch.float32, seed=0, sizes=SIZES, **overrides):
    """The tiny model of a family, in eval mode, or one of other `sizes`; `overrides` replace configuration fields.

    A test that asks for a family that the installed transformers lacks is skipped.
    """
    skip_where_lacking(name)
    family = FAMILIES[name]
    by = family.modelled_by or name
    model_class = getattr(importlib.import_module(f"transformers.models.{by}.modeling_{by}"), family.model)
    config_class = transformers.CONFIG_MAPPING[name] if family.modelled_by else model_class.config_class
    known = config_fields(config_class) | ALWAYS
    given = {field: value for field, value in sizes.items() if field in known} | family.sizes | overrides
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
