# ruff: noqa: E402  versions are looked at before anything else of a peer is imported
"""Hugging Face transformers: record and replay the routing of its MoE models.

from foreroute.adapters import hf

routed = hf.attach(model)
"""

from foreroute.adapters.versions import require_peers

require_peers("torch", "transformers")

from foreroute.adapters.hf.attach import attach
from foreroute.adapters.hf.distribute import distribute
from foreroute.adapters.hf.local_models import build_model, load_pretrained
from foreroute.adapters.hf.model import RoutedTransformer
from foreroute.adapters.hf.tokenizer import Tokenizer

__all__ = [
    "RoutedTransformer",
    "Tokenizer",
    "attach",
    "build_model",
    "distribute",
    "load_pretrained",
]
