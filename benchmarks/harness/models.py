"""The small MoE models of the cases, on Hugging Face and on Megatron-Core, and one training step of each."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from foreroute.adapters import hf
from foreroute.adapters.hf.loading import spread
from foreroute.testing import megatron_on_cpu

CPU = torch.device("cpu")
Losses = list[dict[str, Tensor]]


class Sizes(NamedTuple):
    """Sizes of a Qwen3-MoE, in the words of no framework; `head_width` is that of the hidden size unless given."""

    hidden: int
    heads: int
    kv_heads: int
    experts: int
    top_k: int
    expert_width: int
    layers: int = 2
    vocabulary: int = 256
    head_width: int | None = None

    @property
    def attention_width(self) -> int:
        """Width of all heads together."""
        return self.heads * (self.head_width or self.hidden // self.heads)

    def of_hf(self) -> dict[str, Any]:
        """Name them as transformers does."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.attention_width // self.heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_width,
            "norm_topk_prob": True,
        }

    def of_megatron(self) -> dict[str, Any]:
        """Name them as Megatron-Core does, with what else makes its layers those of a Qwen3-MoE."""
        return {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_query_groups": self.kv_heads,
            "kv_channels": self.attention_width // self.heads,
            "ffn_hidden_size": self.hidden,
            "num_moe_experts": self.experts,
            "moe_router_topk": self.top_k,
            "moe_ffn_hidden_size": self.expert_width,
            "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "add_bias_linear": False,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
        }


def keep_memory() -> None:
    """Let glibc keep freed memory: handing it back and faulting it in again takes a varying half of all time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for trim_or_map_threshold in (-1, -3):
            mallopt(trim_or_map_threshold, 1 << 30)


def spread_model(
    sizes: Sizes,
    implementation: str = "foreroute",
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    recomputes: bool = False,
) -> Any:
    """Build a model of transformers in training mode, spread over all ranks, with the same weights each time.

    A collective call. With `recomputes` backward passes compute activations anew.
    """
    whole = hf.build_model("qwen3_moe", seed=0, **sizes.of_hf()).to(dtype)
    model = spread(whole, device, implementation).train()
    if recomputes:
        model.activation_checkpointing_enable()
    return model


def run_model(model: Any, batch: Tensor, *, updating: bool = True) -> None:
    """Run a forward of a model of transformers, compiled or not, and a backward if `updating`."""
    loss = model(input_ids=batch, use_cache=False).logits.float().log_softmax(-1)[..., 0].mean()
    if updating:
        loss.backward()


def start_megatron(folder: str, device: torch.device) -> None:
    """Begin a world of one rank for Megatron on this machine."""
    if device.type == "cpu":
        megatron_on_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(0)


def start_megatron_ranks(num_ranks: int) -> None:
    """Give each of these CPU processes, which have a process group, its experts of every layer."""
    megatron_on_cpu.install()
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks, create_gloo_process_groups=False)


def gpt_model(sizes: Sizes, settings: Mapping[str, Any], width: int) -> Any:
    """Build a model of Megatron-Core with these settings beside its sizes, for sequences of up to `width` tokens."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    # Megatron draws weights from the global state, transformers' builder does not
    torch.manual_seed(0)
    config = TransformerConfig(**{**megatron_on_cpu.CONFIG, **sizes.of_megatron(), **settings})
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=sizes.vocabulary,
        max_sequence_length=width,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).train()


def forward_step(batches: Iterator[dict[str, Any]], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Return what Megatron's schedules take: the losses of the tokens of a batch, and what reduces them."""
    tokens = next(batches)["tokens"]
    width, device = tokens.shape[1], tokens.device
    positions = torch.arange(width, device=device).expand_as(tokens)
    ahead = torch.ones(width, width, dtype=torch.bool, device=device).triu(1)[None, None]
    losses = model(tokens, positions, ahead, labels=tokens.roll(-1, 1))
    return losses, lambda losses: (losses.mean(), {"losses": losses.detach()})


def run_schedule(
    model: Any, forward: Callable[..., Any], batches: Sequence[dict[str, Any]], *, updating: bool = True
) -> Losses:
    """Send micro-batches through Megatron's schedule, with backward passes if `updating`; return losses by token."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.zero_grad(set_to_none=True)
    sequences, width = batches[0]["tokens"].shape
    with torch.set_grad_enabled(updating):
        losses: Losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=model,
            num_microbatches=len(batches),
            seq_length=width,
            micro_batch_size=sequences,
            forward_only=not updating,
        )
    return losses
