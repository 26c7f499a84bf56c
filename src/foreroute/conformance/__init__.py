"""The kit that shows an integration right: named checks of the known bugs.

Importing this room loads no torch; `conformance.huggingface` does.
"""

from foreroute.conformance.adapter import (
    AdapterUnderTest,
    Batch,
    Case,
    Fault,
    GroupLimit,
    ModelUnderTest,
    Seen,
    Step,
    Unsupported,
)
from foreroute.conformance.check import Check, CheckResult, Outcome
from foreroute.conformance.kit import ALL_CHECKS, KNOWN_BUGS, ConformanceReport, conformance_tests, run_conformance

__all__ = [
    "ALL_CHECKS",
    "KNOWN_BUGS",
    "AdapterUnderTest",
    "Batch",
    "Case",
    "Check",
    "CheckResult",
    "ConformanceReport",
    "Fault",
    "GroupLimit",
    "ModelUnderTest",
    "Outcome",
    "Seen",
    "Step",
    "Unsupported",
    "conformance_tests",
    "run_conformance",
]
