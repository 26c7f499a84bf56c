"""Rates that were fitted to measurements, as words and as rows of a table for a terminal or a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foreroute.report.wording import duration, percentage

if TYPE_CHECKING:
    from foreroute.simulate.fit import FitRecord


@dataclass(frozen=True)
class FitRow:
    """A fitted parameter. Cells are text with units."""

    name: str
    before: str
    after: str


def fit_rows(found: FitRecord, before: Mapping[str, float]) -> list[FitRow]:
    """One row per fitted parameter.

    Args:
        found: what was fitted.
        before: the configured values by name.
    """
    return [FitRow(name, _value(name, before[name]), _value(name, value)) for name, value in found.parameters.items()]


def fit_summary(found: FitRecord) -> str:
    """How near the predictions are, in a sentence."""
    correlation = "not defined" if found.rank_correlation is None else f"{found.rank_correlation:.2f}"
    return (
        f"{len(found.names)} measured stages are predicted with a median error of {percentage(found.median_error)} and "
        f"a worst of {percentage(found.worst_error)}; the rank correlation is {correlation}. The rates "
        "were fitted to these very measurements."
    )


def _value(name: str, value: float) -> str:
    if name.endswith("_flops_per_s"):
        return f"{value / 1e12:,.4g} TFLOP/s"
    if name.endswith("_bytes_per_s"):
        return f"{value / 1e9:,.4g} GB/s"
    return duration(value)
