"""The Megatron model of a cell: its process groups, its configuration, its chunks on this rank."""

import gc

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import TransformerConfig

from foreroute.adapters import megatron
from foreroute.testing import megatron_on_cpu
from foreroute.testing.ranks import leave_groups
from tests.adapters.megatron import grouped_linear
from tests.adapters.megatron.cpu_modules import PackedAttention

RECOMPUTE_SETTINGS = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}
VOCABULARY = 64
EXPERTS, TOP_K = 8, 2


_made = None
"""What Megatron's process groups of this process were made for, and all groups that there were then."""


def initialize(cell):
    """Megatron's process groups for this cell; those of the last cell stay where it splits the model alike.

    Models that were built before are of no use any more.
    """
    global _made
    sizes = sizes_of(cell)
    stay = _made[1] if _made and _made[0] == sizes and dist.group.WORLD in _made[1] else set()
    if not stay:
        parallel_state.destroy_model_parallel()
    dist.barrier()  # nobody is still at work in what is given up
    leave_groups(stay)
    gc.collect()  # models hold them, in circles
    if stay:
        parallel_state.set_virtual_pipeline_model_parallel_rank(0 if cell.vpp > 1 else None)
    else:
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        _made = sizes, set(dist.distributed_c10d._world.pg_map)


def sizes_of(cell):
    return {
        "tensor_model_parallel_size": cell.tp,
        "pipeline_model_parallel_size": cell.pp,
        "virtual_pipeline_model_parallel_size": cell.vpp if cell.vpp > 1 else None,
        "context_parallel_size": cell.cp,
        "expert_model_parallel_size": cell.ep,
        "expert_tensor_parallel_size": cell.etp,
    }


def config(cell):
    settings = {
        "num_layers": cell.layers,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOP_K,
        "moe_ffn_hidden_size": 32,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": cell.dispatcher,
        "moe_enable_routing_replay": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "init_method_std": 0.2,
        "sequence_parallel": cell.tp > 1,
        "variable_seq_lengths": cell.packed and not cell.same_shapes,
        # two ranks in a ring: only separate groups tell what comes from the rank before and what from the rank after
        "overlap_p2p_comm": cell.vpp > 1,
        "batch_p2p_comm": cell.vpp == 1,
    }
    return TransformerConfig(
        **{
            **megatron_on_cpu.CONFIG,
            **settings,
            **sizes_of(cell),
            **RECOMPUTE_SETTINGS[cell.recompute],
            **cell.settings,
        }
    )


def build(cell, seed=0):
    """The model chunks of this rank, a list of one without virtual stages."""
    torch.manual_seed(seed)
    configured = config(cell)
    stages = range(cell.vpp) if cell.vpp > 1 else [None]
    chunks = [_chunk(cell, configured, stage) for stage in stages]
    if "fused" in cell.experts:
        grouped_linear.fuse(chunks)
    return chunks


def attached(cell):
    initialize(cell)
    chunks = build(cell)
    return chunks, megatron.attach(chunks)


def _chunk(cell, configured, stage):
    block = get_gpt_decoder_block_spec(configured, use_transformer_engine=False, vp_stage=stage)
    if not cell.as_shipped:
        megatron_on_cpu.use_norm(
            block, getattr(megatron_on_cpu, configured.normalization), of_heads=configured.qk_layernorm
        )
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = PackedAttention
    if "grouped" in cell.experts:
        for layer in block.layer_specs:
            grouped_linear.use_grouped_experts(layer.submodules.mlp)
    extra = get_gpt_mtp_block_spec(configured, block, use_transformer_engine=False, vp_stage=stage)
    is_stage = {"ignore_virtual": False, "vp_stage": stage}
    return GPTModel(
        configured,
        block,
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(**is_stage),
        post_process=parallel_state.is_pipeline_last_stage(**is_stage),
        mtp_block_spec=extra,
        vp_stage=stage,
    )
