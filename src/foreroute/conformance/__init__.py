"""The kit that shows an integration right: named checks of the known bugs, canary routes, and an oracle of layouts.

Importing this room loads no torch; `conformance.huggingface` does.
"""

from foreroute.conformance.adapter import (
    AdapterUnderTest,
    Batch,
    Case,
    Fault,
    Groups,
    ModelUnderTest,
    Seen,
    Step,
    Unsupported,
)
from foreroute.conformance.canary import Canary, canary_capacity, canary_trace
from foreroute.conformance.check import Check, CheckResult, Outcome
from foreroute.conformance.checks import ALL_CHECKS
from foreroute.conformance.kit import ConformanceReport, conformance_tests, run_conformance
from foreroute.conformance.known_bugs import KNOWN_BUGS, KnownBug, bugs_of

__all__ = [
    "ALL_CHECKS",
    "KNOWN_BUGS",
    "AdapterUnderTest",
    "Batch",
    "Canary",
    "Case",
    "Check",
    "CheckResult",
    "ConformanceReport",
    "Fault",
    "Groups",
    "KnownBug",
    "ModelUnderTest",
    "Outcome",
    "Seen",
    "Step",
    "Unsupported",
    "bugs_of",
    "canary_capacity",
    "canary_trace",
    "conformance_tests",
    "run_conformance",
]
