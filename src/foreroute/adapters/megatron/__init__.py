# ruff: noqa: E402  versions are looked at before anything else of a peer is imported
"""Megatron-Core: record and replay the routing of its MoE models, in its own pipeline schedules and parallelisms.

from foreroute.adapters import megatron

routed = megatron.attach(model_or_chunks)
forward_step = routed.replaying(forward_step)
"""

from foreroute.adapters.versions import require_peers

require_peers("torch", "megatron-core")

from foreroute.adapters.megatron.attach import attach
from foreroute.adapters.megatron.routed_megatron import RoutedMegatron

__all__ = ["RoutedMegatron", "attach"]
