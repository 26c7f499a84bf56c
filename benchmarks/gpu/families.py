"""Families of MoE models that differ in how they select, as small models, and the formula of each one's gate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.gpu.part import Skipped
from foreroute.adapters import hf

Score = Callable[[Tensor], Tensor]


def _softmax(logits_RE: Tensor) -> Tensor:
    return logits_RE.softmax(-1)


def _sqrt_softplus(logits_RE: Tensor) -> Tensor:
    return nn.functional.softplus(logits_RE).sqrt()


@dataclass(frozen=True)
class Family:
    """How one family selects.

    Attributes:
        selects: in words.
        sizes: fields of its configuration besides those of `_sizes`, if it has them; None takes one of those out.
        score: of its logits; None where the gate is no function of the logits and the picks alone.
        renormalised: whether gate weights are divided by their sum over the picks.
        scale: what they are multiplied by.
    """

    selects: str
    sizes: dict[str, Any] = field(default_factory=dict)
    score: Score | None = _softmax
    renormalised: bool = True
    scale: float = 1.0

    def gate_weights(self, logits_RE: Tensor, ids_RK: Tensor) -> Tensor | None:
        """float64 [R, K] on the host, by the formula of the family; None where it is not written down here."""
        if self.score is None:
            return None
        picked = self.score(logits_RE.detach().cpu().double()).gather(-1, ids_RK.cpu())
        if self.renormalised:
            picked = picked / picked.sum(-1, keepdim=True)
        return self.scale * picked


FAMILIES = {
    "qwen3_moe": Family("softmax, top-k, renormalised", {"norm_topk_prob": True}),
    "deepseek_v3": Family(
        "sigmoid, a bias that steers the selection alone, limited to groups",
        {"routed_scaling_factor": 2.5, "norm_topk_prob": True},
        torch.sigmoid,
        scale=2.5,
    ),
    "gpt_oss": Family("top-k of logits with a bias, softmax over the picks"),
    "mixtral": Family("softmax, top-k, renormalised", {"head_dim": None}),
    "olmoe": Family("softmax, top-k, as it is", {"norm_topk_prob": False}, renormalised=False),
    "deepseek_v2": Family(
        "softmax limited to groups, as it is",
        {"topk_method": "group_limited_greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        renormalised=False,
    ),
    "glm4_moe": Family(
        "sigmoid and bias, limited to groups", {"routed_scaling_factor": 1.0, "norm_topk_prob": True}, torch.sigmoid
    ),
    "deepseek_v4": Family(
        "square root of softplus; the first layer looks its experts up by token",
        {
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "o_groups": 2,
            "o_lora_rank": 8,
            "num_hidden_layers": 3,
            "routed_scaling_factor": 1.5,
            "head_dim": 16,
            "qk_rope_head_dim": 8,
        },
        _sqrt_softplus,
        scale=1.5,
    ),
    "qwen2_moe": Family("softmax, as it is, beside a shared expert", {"norm_topk_prob": False}, renormalised=False),
    "minimax_m2": Family("sigmoid and bias, renormalised", {}, torch.sigmoid),
    "ernie4_5_moe": Family("softmax and bias, renormalised", {"head_dim": None}),
    "phimoe": Family("sparsemixer: two picks, each within a band", {"input_jitter_noise": 0.0, "head_dim": None}, None),
}
READ_BUT_NOT_DECLARED = {"head_dim"}


def build(name: str, device: torch.device, dtype: torch.dtype, *, full: bool, experts: str, **sizes: Any) -> Any:
    """A model of a family in eval mode, with random weights and with biases and tables that make a difference.

    Raises:
        Skipped: when this transformers lacks the family.
    """
    if name not in transformers.CONFIG_MAPPING:
        raise Skipped(f"transformers {transformers.__version__} has no {name}")
    known = transformers.CONFIG_MAPPING[name]()
    wanted = _sizes(full=full) | FAMILIES[name].sizes | sizes
    given = {
        key: value
        for key, value in wanted.items()
        if value is not None and (hasattr(known, key) or key in READ_BUT_NOT_DECLARED)
    }
    model = hf.build_model(name, seed=0, experts_implementation=experts, **given)
    model.set_attn_implementation("eager")  # its gradients repeat their bits, those of fused attention may not
    return _with_live_values(model).to(device, dtype).eval()


def twin_of(model: Any) -> Any:
    """The same model, which nobody will attach."""
    return copy.deepcopy(model)


def use_experts(model: Any, implementation: str) -> None:
    """Have its experts computed by this implementation from now on."""
    model.config._experts_implementation = implementation


def _sizes(*, full: bool) -> dict[str, Any]:
    """Fields of configurations; a family takes those that it declares."""
    width, experts, top_k, vocabulary = (512, 16, 4, 2048) if full else (32, 8, 2, 64)
    inner = width // 2
    head = 64 if full else 8
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 3,
        "num_attention_heads": width // head,
        "num_key_value_heads": width // head,
        "head_dim": head,
        "initializer_range": 0.1 if full else 0.3,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "num_experts": experts,
        "num_local_experts": experts,
        "n_routed_experts": experts,
        "moe_num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_k": top_k,
        "moe_topk": top_k,
        "moe_intermediate_size": inner,
        "n_shared_experts": 1,
        "shared_expert_intermediate_size": inner,
        "first_k_dense_replace": 1,
        "moe_layer_start_index": 1,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": inner,
        "kv_lora_rank": inner,
        "qk_rope_head_dim": head,
        "qk_nope_head_dim": head,
        "v_head_dim": head,
        "index_head_dim": 2 * head,
        "index_n_heads": 2,
        "index_topk": 16,
    }


@torch.no_grad()
def _with_live_values(model: Any) -> Any:
    """What starts as zeros, filled in: gates, selection biases, tables from tokens to experts."""
    seeded = torch.Generator().manual_seed(1)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("tid2eid"):
            experts = model.config.n_routed_experts
            order = torch.rand(len(tensor), experts, generator=seeded).argsort(-1)
            tensor.copy_(order[:, : tensor.shape[1]])
        elif tensor.is_floating_point() and (tensor.ndim > 1 or "bias" in name) and not tensor.any():
            tensor.normal_(0, 0.1, generator=seeded)
    return model
