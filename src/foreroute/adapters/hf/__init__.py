"""Hugging Face transformers: record and replay the routing of its MoE models.

    from foreroute.adapters import hf

    routed = hf.attach(model)

A name loads the file that it is in.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foreroute.adapters.versions import require_peers

require_peers("torch", "transformers")

if TYPE_CHECKING:
    from foreroute.adapters.hf.attaching import attach
    from foreroute.adapters.hf.distributing import distribute, distribute_pretrained
    from foreroute.adapters.hf.local_models import build_model
    from foreroute.adapters.hf.model import RoutedTransformer
    from foreroute.adapters.hf.sharded_checkpoint import save_pretrained
    from foreroute.adapters.hf.stacks import RoutedStacks, attach_stacks

__all__ = [
    "RoutedStacks",
    "RoutedTransformer",
    "attach",
    "attach_stacks",
    "build_model",
    "distribute",
    "distribute_pretrained",
    "save_pretrained",
]

_FILE_OF = {
    "RoutedStacks": "stacks",
    "RoutedTransformer": "model",
    "attach": "attaching",
    "attach_stacks": "stacks",
    "build_model": "local_models",
    "distribute": "distributing",
    "distribute_pretrained": "distributing",
    "save_pretrained": "sharded_checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILE_OF[name]}"), name)
