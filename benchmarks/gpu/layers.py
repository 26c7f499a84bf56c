"""Models of layers of Qwen3-30B-A3B with random weights, made on the device that they run on."""

from __future__ import annotations

import gc
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.harness.models import Sizes

TRUE_LAYER = Sizes(2048, 32, 4, experts=128, top_k=8, expert_width=768, head_width=128)
"""Of Qwen3-30B-A3B, which has 48 of them."""
SMALL_LAYER = Sizes(64, 4, 2, experts=16, top_k=4, expert_width=32)
LAYER_BYTES = 1.3e9
"""Of the weights of one true layer in bfloat16."""


def layered_model(
    device: torch.device, num_layers: int, vocabulary: int, layer: Sizes, *, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """A model of these layers in eval mode, with the experts of `grouped_mm`.

    Linear maps are drawn with a deviation of 0.9 over the root of the hidden size (0.02 at the true one), so that
    logits of routers spread alike at every size.
    """
    torch.manual_seed(0)
    sizes = layer._replace(layers=num_layers, vocabulary=vocabulary)
    config = transformers.Qwen3MoeConfig(**sizes.of_hf(), initializer_range=0.9 / layer.hidden**0.5)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, experts_implementation="grouped_mm", trust_remote_code=False
        )
    return model.eval()


def layers_that_fit(device: torch.device, bytes_each: float, spare_bytes: float, most: int) -> int:
    """Count the true layers that fit the free memory, where each takes so much and all else takes `spare_bytes`."""
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(most, int((0.9 * free - spare_bytes) / bytes_each)))


def random_tokens(device: torch.device, vocabulary: int, shape: tuple[int, int]) -> Tensor:
    """int64 [B, T], the same on every device."""
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(device)


def free_memory(device: torch.device) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
