"""Engine output to trace. No torch."""

from foreroute.capture.generation import Generation

__all__ = ["Generation"]
