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
    from foreroute.adapters.hf.expert_lora import spread_adapters
    from foreroute.adapters.hf.loading import build_model
    from foreroute.adapters.hf.memory import draw_micro_batches, measure_memory
    from foreroute.adapters.hf.routed_transformer import RoutedTransformer

__all__ = [
    "RoutedTransformer",
    "attach",
    "build_model",
    "draw_micro_batches",
    "measure_memory",
    "spread_adapters",
]

_FILE_OF = {
    "RoutedTransformer": "routed_transformer",
    "attach": "attaching",
    "build_model": "loading",
    "draw_micro_batches": "memory",
    "measure_memory": "memory",
    "spread_adapters": "expert_lora",
}


def _register() -> None:
    """Let `DistributedConfig(ep_implementation="foreroute")` name our class, where transformers has such a registry."""
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:  # before 5.23
        return

    def make(*args: Any) -> Any:
        from foreroute.adapters.hf.expert_parallel import ForerouteEP

        return ForerouteEP(*args)

    EPImplementationInterface.register("foreroute", make)


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILE_OF[name]}"), name)


_register()
