"""A worker process that ends in the middle of a forward."""

import os

import torch

from foreroute.adapters import hf
from tests.ep.training import batch
from tests.models import tiny


def forward_without_a_rank(rank, gone):
    """What the ranks that are left raise."""
    placed = hf.distribute(tiny("qwen3_moe"), timeout_s=20)
    placed.model.model.layers[2].mlp.gate.register_forward_pre_hook(lambda *_: os._exit(1) if rank == gone else None)
    with torch.no_grad():
        placed.model(**batch(rank, 0, 0), use_cache=False)
