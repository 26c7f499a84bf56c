"""Every check of the kit, in the order in which they are reported."""

from foreroute.conformance.check import Check
from foreroute.conformance.checks import gates, lifecycle, placement, recompute, recording, refusals, rows, traps

ALL_CHECKS: tuple[Check, ...] = (
    *placement.CHECKS,
    *rows.CHECKS,
    *gates.CHECKS,
    *recompute.CHECKS,
    *lifecycle.CHECKS,
    *recording.CHECKS,
    *traps.CHECKS,
    *refusals.CHECKS,
)
"""Every check, in the order in which they run."""

__all__ = ["ALL_CHECKS"]
