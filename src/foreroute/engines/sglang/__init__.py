"""SGLang as the trainer's rollout engine, behind its HTTP server. SGLang itself is not imported."""

from foreroute.engines.sglang.engine import ServerEngine, sampled_of

__all__ = ["ServerEngine", "sampled_of"]
