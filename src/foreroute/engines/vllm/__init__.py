"""vLLM as the trainer's rollout engine: in a process of its own, or behind its OpenAI-compatible server.

    from foreroute.adapters import hf
    from foreroute.adapters.checkpoint import ServedModel
    from foreroute.engines import vllm

    settings = vllm.ProcessSettings(python=Path("venv-vllm/bin/python"), precision="bfloat16")
    with vllm.ProcessEngine(ServedModel.of(hf.attach(model)), settings) as engine:
        engine.load_weights(model.state_dict(), version=0)
        generation = engine.generate(prompts, Sampling(max_new_tokens=512, end_token=0, group_size=8), generator)

vLLM itself is not imported in the trainer's process: it pins other versions, and lives in an environment of its own.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreroute.engines.vllm.engine import ProcessEngine
    from foreroute.engines.vllm.partial import PartialGeneration
    from foreroute.engines.vllm.server import ServerEngine
    from foreroute.engines.vllm.settings import ProcessSettings

__all__ = ["PartialGeneration", "ProcessEngine", "ProcessSettings", "ServerEngine"]

_HOMES = {
    "PartialGeneration": "partial",
    "ProcessEngine": "engine",
    "ProcessSettings": "settings",
    "ServerEngine": "server",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is asked for: the worker and vLLM's extension are in this package, and need no trainer."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
