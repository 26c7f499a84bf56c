# ruff: noqa: E402  versions are looked at before anything else of a peer is imported
"""Hugging Face transformers: record and replay the routing of its MoE models.

from foreroute.adapters import hf

routed = hf.attach(model)
"""

from typing import TYPE_CHECKING, Any

from foreroute.adapters.versions import require_peers

require_peers("torch", "transformers")

from foreroute.adapters.hf.attach import attach, attach_stacks
from foreroute.adapters.hf.local_models import build_model, load_pretrained
from foreroute.adapters.hf.model import RoutedTransformer
from foreroute.adapters.hf.stacks import RoutedStacks
from foreroute.adapters.hf.tokenizer import Tokenizer

if TYPE_CHECKING:
    from foreroute.adapters.hf.distributing import distribute

__all__ = [
    "RoutedStacks",
    "RoutedTransformer",
    "Tokenizer",
    "attach",
    "attach_stacks",
    "build_model",
    "distribute",
    "load_pretrained",
]


def __getattr__(name: str) -> Any:
    """Load what executes plans when it is asked for."""
    if name != "distribute":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from foreroute.adapters.hf.distributing import distribute

    return distribute
