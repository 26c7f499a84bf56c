"""Every check of the kit, in the order in which they are reported."""

from foreroute.conformance.check import Check
from foreroute.conformance.checks import gates, refusals, routes, sessions

ALL_CHECKS: tuple[Check, ...] = (
    *routes.CHECKS,
    *gates.CHECKS,
    *sessions.CHECKS,
    *refusals.CHECKS,
)
"""Every check, in the order in which they run."""

__all__ = ["ALL_CHECKS"]
