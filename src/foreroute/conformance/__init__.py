"""The kit that shows an integration right: canary routes that name their own place, and an oracle of layouts."""

from foreroute.conformance.canary import Canary, canary_capacity, canary_trace

__all__ = ["Canary", "canary_capacity", "canary_trace"]
