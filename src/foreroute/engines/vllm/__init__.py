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
    from foreroute.engines.vllm.process_engine import PartialGeneration, ProcessEngine, ProcessSettings
    from foreroute.engines.vllm.server_engine import VLLMServerEngine

__all__ = ["PartialGeneration", "ProcessEngine", "ProcessSettings", "VLLMServerEngine"]


def __getattr__(name: str) -> Any:
    """Load a name when it is asked for: the worker and vLLM's plugin are in this package, and need no trainer."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    module = "server_engine" if name == "VLLMServerEngine" else "process_engine"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
