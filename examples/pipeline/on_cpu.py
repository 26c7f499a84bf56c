"""The pipeline on the CPU: what Megatron-Core takes for granted of large machines. One with GPUs needs none of it.

vLLM on a CPU needs nothing here: foreroute's worker starts it eagerly and has it pack the experts of a reload.
"""

from __future__ import annotations

import queue
from typing import Any

import torch

from foreroute.testing.megatron_on_cpu import CONFIG as CONFIG
from foreroute.testing.megatron_on_cpu import install as install


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


def checkpoints_without_server() -> None:
    """Megatron's writers report to a server process, made by importing the program again: on two cores, in ten seconds.

    It also outlives a rank that is killed. A save that is waited for takes a plain queue.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()
