"""The pipeline on the CPU: what Megatron-Core takes for granted of CUDA, and no more. A machine with GPUs needs none.

vLLM on a CPU needs nothing here: foreroute's worker starts it eagerly and has it pack the experts of a reload.
"""

from __future__ import annotations

from typing import Any

import torch

from examples.megatron.on_cpu import CONFIG as CONFIG
from examples.megatron.on_cpu import install as install


class RMSNorm(torch.nn.RMSNorm):
    """Stands where TENorm does: without Transformer Engine, Megatron's newest has no RMSNorm to train with."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel


def norms_of_torch(block: Any) -> None:
    """Have every norm of a decoder's layer specs be torch's."""
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
