"""How far apart trainer and engine are, and why. No torch."""

from foreroute.mismatch.explain import Defect, Explanation, explain

__all__ = ["Defect", "Explanation", "explain"]
