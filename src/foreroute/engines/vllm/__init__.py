"""vLLM as the trainer's rollout engine: a server that is started and ended here, or one of yours.

    from foreroute.adapters import hf
    from foreroute.adapters.checkpoint import ServedModel
    from foreroute.engines import vllm

    settings = vllm.ServerSettings(python=Path("venv-vllm/bin/python"), precision="bfloat16")
    with vllm.VLLMEngine(ServedModel.of(hf.attach(model)), settings) as engine:
        engine.load_weights(model.state_dict(), version=0)
        generation = engine.generate(prompts, Sampling(max_new_tokens=512, end_token=0, group_size=8), generator)

vLLM itself is not imported in the trainer's process: it pins other versions, and lives in an environment of its own.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreroute.engines.sequences import PartialGeneration
    from foreroute.engines.vllm.engine import VLLMEngine
    from foreroute.engines.vllm.server import ServerSettings

__all__ = ["PartialGeneration", "ServerSettings", "VLLMEngine"]
_MODULES = {"PartialGeneration": "sequences", "ServerSettings": "vllm.server", "VLLMEngine": "vllm.engine"}


def __getattr__(name: str) -> Any:
    """Load a name when it is asked for: what runs beside vLLM is in this package too, and needs no trainer."""
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name!r}")
    return getattr(import_module(f"foreroute.engines.{_MODULES[name]}"), name)
