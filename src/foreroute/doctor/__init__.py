"""Diagnosis of a mismatch, its start and its remedies: evidence about a trainer and an engine, and findings.

Importing this room loads no torch; `doctor.examine`, which gathers evidence from a model, does.
"""

from foreroute.doctor.comparison import Comparison, compare
from foreroute.doctor.evidence import Evidence, Finding, Severity
from foreroute.doctor.findings import Diagnosis, diagnose

__all__ = ["Comparison", "Diagnosis", "Evidence", "Finding", "Severity", "compare", "diagnose"]
