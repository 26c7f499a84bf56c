"""The policy: a tiny Qwen3-MoE, as a checkpoint of Hugging Face that the engine serves, and as Megatron trains it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from examples.pipeline import weights
from foreroute.adapters import hf, megatron
from foreroute.adapters.checkpoint import ModelWriter
from foreroute.adapters.megatron import RoutedMegatron
from foreroute.testing import megatron_on_cpu as on_cpu

VOCABULARY, WIDTH = 64, 25
"""Tokens; positions of a prompt with its longest response. The last is no input, and tensor ranks share the others."""
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's attention on the CPU has no kernel for smaller heads
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "initializer_range": 0.15,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Policy:
    """A model that is trained, on this rank.

    Attributes:
        model: GPTModel; a pipeline stage of it.
        routed: the same, attached.
        config: the `config.json` of its checkpoint.
    """

    model: Any
    routed: RoutedMegatron
    config: Mapping[str, Any]

    @classmethod
    def of(cls, checkpoint: Path, dtype: torch.dtype) -> Policy:
        """The model of a checkpoint, its layers and experts shared as Megatron's process groups say."""
        config = json.loads((checkpoint / "config.json").read_text())
        model = build_model(config, dtype)
        routed = megatron.attach(model)
        weights.load(model, routed, checkpoint, config)
        return cls(model, routed, config)

    def exported(self) -> Iterator[tuple[str, Tensor]]:
        """As `weights.exported`."""
        return weights.exported(self.model, self.routed, self.config)


def make_checkpoint(folder: Path) -> None:
    """Write the untrained policy."""
    ModelWriter(hf.build_model("qwen3_moe", seed=0, **SIZES)).write(folder)


def build_model(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Qwen3-MoE in Megatron, with the weights that it makes itself."""
    dense = set(config["mlp_only_layers"])
    settings = TransformerConfig(
        **{**on_cpu.CONFIG, "params_dtype": dtype, "pipeline_dtype": dtype, "normalization": "RMSNorm"},
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        ffn_hidden_size=config["intermediate_size"],
        layernorm_epsilon=config["rms_norm_eps"],
        qk_layernorm=True,
        num_moe_experts=config["num_local_experts"],  # the name that transformers writes
        moe_router_topk=config["num_experts_per_tok"],
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        moe_layer_freq=[int(layer not in dense) for layer in range(config["num_hidden_layers"])],
        moe_router_dtype="fp64" if dtype == torch.float64 else "fp32",
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        pipeline_model_parallel_size=mpu.get_pipeline_model_parallel_world_size(),
        tensor_model_parallel_size=mpu.get_tensor_model_parallel_world_size(),
        sequence_parallel=mpu.get_tensor_model_parallel_world_size() > 1,
        expert_model_parallel_size=mpu.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=1,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    block = get_gpt_decoder_block_spec(settings, use_transformer_engine=False)
    on_cpu.use_norm(block, on_cpu.RMSNorm, of_heads=True)
    model = GPTModel(
        settings,
        block,
        vocab_size=config["vocab_size"],
        max_sequence_length=config["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=config["rope_parameters"]["rope_theta"],
        share_embeddings_and_output_weights=False,
        parallel_output=False,  # a loss sees the whole vocabulary
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
    )
    return model.to(dtype).train()
