"""What a mismatch is, where it starts, and what to do about it: evidence about a trainer and an engine, and findings.

Importing this room loads no torch; `doctor.examine`, which gathers evidence from a model, does.
"""

from foreroute.doctor.comparison import Comparison, compare, standard_error
from foreroute.doctor.evidence import Evidence, Finding, Measures, Severity, TrainerPass
from foreroute.doctor.findings import Diagnosis, diagnose

__all__ = [
    "Comparison",
    "Diagnosis",
    "Evidence",
    "Finding",
    "Measures",
    "Severity",
    "TrainerPass",
    "compare",
    "diagnose",
    "standard_error",
]
