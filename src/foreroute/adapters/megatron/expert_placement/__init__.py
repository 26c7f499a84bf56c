"""Home placement: which expert-parallel rank each expert lives on, and how experts move there between two steps."""

from foreroute.adapters.megatron.expert_placement.placement import HomePlacement

__all__ = ["HomePlacement"]
