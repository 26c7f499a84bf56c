"""verl's Megatron engine on a machine without a GPU. On GPUs nothing of this is loaded.

Importing it puts the stand-ins in place; verl is told of it before foreroute, in its configuration:

    actor_rollout_ref.model.external_lib=[megatron_on_cpu,foreroute.trainers.verl.megatron]

`foreroute.testing.megatron_on_cpu` has what Megatron-Core itself takes for granted of CUDA; here is what its
optimizers, mbridge and packed batches need beside. Whatever routes, dispatches, differentiates or steps is Megatron's
own.
"""

import re
from copy import copy
from functools import wraps
from itertools import pairwise

import torch
from torch.overrides import TorchFunctionMode

from foreroute.testing import megatron_on_cpu

megatron_on_cpu.install()
megatron_on_cpu.name_types_of_cuda()

import mbridge.core.llm_bridge as llm_bridge
from mbridge.core.bridge import Bridge
from mbridge.core.util import unwrap_model
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.dot_product_attention import DotProductAttention


class CudaIsTheCPU(TorchFunctionMode):
    """Megatron's optimizers make tensors on the device "cuda", by name, and in pinned memory."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)


CudaIsTheCPU().__enter__()

# their Adam is torch's here, which has no state before its first step, while a checkpoint is read into one that has;
# and it counts steps by parameter, while a checkpoint has them by group
_state_dict, _load_state_dict = DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict


def begun_state_dict(optimizer):
    adam = optimizer.optimizer
    for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
        if not adam.state[parameter]:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            adam.state[parameter] = {"step": torch.tensor(0.0), **moments}
    return _state_dict(optimizer)


def load_state_dict(optimizer, state_dict):
    _load_state_dict(optimizer, state_dict)
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))


DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict = begun_state_dict, load_state_dict

# Megatron's generators are CUDA's, and verl reads no checkpoint that has no state of theirs
tensor_parallel.get_cuda_rng_tracker().get_states = lambda: {"cpu": torch.get_rng_state()}

# mbridge builds layers of Transformer Engine, which wants CUDA
_block_spec = llm_bridge.get_gpt_decoder_block_spec


@wraps(_block_spec)  # mbridge looks for parameters by their names
def local_block_spec(config, use_transformer_engine=True, **kwargs):
    block = _block_spec(config, use_transformer_engine=False, **kwargs)
    # torch's own norm refuses sequence parallelism
    megatron_on_cpu.use_norm(block, megatron_on_cpu.RMSNorm, of_heads=bool(config.qk_layernorm))
    return block


llm_bridge.get_gpt_decoder_block_spec = local_block_spec

# and knows weights by the names that Transformer Engine's layers give them, in loading and in export
_global_names = Bridge._weight_name_mapping_mcore_local_to_global
OF_EXPERT = re.compile(r"experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight")
OF_GROUP = re.compile(r"experts\.(linear_fc\d)\.weight(\d+)")
OF_NORM = re.compile(r"(layers\.\d+\.)input_layernorm\.")


def global_names(bridge, model, consider_ep=True):
    # experts are numbered by rank here: by their local name mbridge would not know them as experts
    first = bridge.config.num_moe_experts // bridge.mpu.ep_size * bridge.mpu.ep_rank if consider_ep else 0
    names = _global_names(bridge, model, consider_ep=False)
    for local, name in names.items():
        name = OF_EXPERT.sub(r"experts.\2.weight\1", OF_NORM.sub(r"\1self_attention.linear_qkv.layer_norm_", name))
        names[local] = OF_GROUP.sub(lambda found: f"experts.{found[1]}.weight{first + int(found[2])}", name)
    return names


class NamedLikeTransformerEngine:
    """A model to load into: by local names mbridge tells experts, which tensor parallelism need not cut."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def state_dict(self):
        return {OF_EXPERT.sub(r"experts.\2.weight\1", name): it for name, it in self._model.state_dict().items()}


_load_weights = Bridge.load_weights


def load_weights(bridge, models, *args, **kwargs):
    return _load_weights(bridge, [NamedLikeTransformerEngine(unwrap_model(model)) for model in models], *args, **kwargs)


Bridge._weight_name_mapping_mcore_local_to_global, Bridge.load_weights = global_names, load_weights

# its own attention takes no packed sequences, nor parts of them on other ranks, and no mask [B, T] of verl
_attention, _init_attention = DotProductAttention.forward, DotProductAttention.__init__


def init_attention(module, config, *args, **kwargs):
    config = copy(config)
    config.context_parallel_size = 1
    _init_attention(module, config, *args, **kwargs)


def causal_attention(
    module, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None
):
    """Of the rows of each sequence, over the keys of all context ranks; padding is on the right, where nobody looks."""
    group = mpu.get_context_parallel_group()
    if packed_seq_params is None:
        ends = torch.tensor([0, len(query) * group.size()])
    else:
        ends = packed_seq_params.cu_seqlens_q_padded.long()
        query, key, value = (part.unsqueeze(1) for part in (query, key, value))
    key, value = (tensor_parallel.gather_from_sequence_parallel_region(part, group=group) for part in (key, value))
    by_rank = [rows_of_rank(ends.tolist(), group.size(), rank) for rank in range(group.size())]
    row_Q, row_K = by_rank[group.rank()], torch.cat(by_rank)
    of_Q, of_K = (torch.bucketize(rows, ends, right=True) for rows in (row_Q, row_K))
    hidden_QK = (of_Q[:, None] != of_K) | (row_Q[:, None] < row_K)
    return _attention(module, query, key, value, hidden_QK[None, None], attn_mask_type, attention_bias)


def rows_of_rank(ends, ranks, rank):
    """Which rows of all sequences a context rank has: of each, chunks `rank` and `2 * ranks - 1 - rank`."""
    if ranks == 1:
        return torch.arange(ends[-1])
    sequences = [torch.arange(*bounds).chunk(2 * ranks) for bounds in pairwise(ends)]
    return torch.cat([chunks[c] for chunks in sequences for c in (rank, 2 * ranks - 1 - rank)])


DotProductAttention.__init__, DotProductAttention.forward = init_attention, causal_attention
