"""How numbers and settings look in tables, sentences and pages. Pure text; escaping is the template's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ABSENT = "–"  # noqa: RUF001  an en dash in a table cell: never measured
GAP = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row of a table, as text.

    Attributes:
        label: what it is about.
        cells: by heading; one that is empty or missing says nothing.
        ours: whether it is about a plan of ours.
        position: of the run that it is about, in a report.
    """

    label: str
    cells: dict[str, str]
    ours: bool = False
    position: int = 0


def reward(value: float | None) -> str:
    """Three decimals."""
    return ABSENT if value is None else f"{value:.3f}"


def percentage(share: float | None) -> str:
    """0.1234 -> 12.3 %. Shares too small for three digits keep one."""
    if share is None:
        return ABSENT
    percent = 100 * share
    if percent == 0 or not math.isfinite(percent):
        return f"{percent:.0f}{GAP}%"
    return (
        f"{percent:.1f}{GAP}%"
        if percent >= 10
        else f"{percent:.2f}{GAP}%"
        if percent >= 0.1
        else f"{percent:.1g}{GAP}%"
    )


def scientific(value: float | None) -> str:
    """0.00123 -> 1.23e-3."""
    if value is None:
        return ABSENT
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def seconds(value: float | None) -> str:
    """Two decimals, or three digits where that is too many or too few."""
    return ABSENT if value is None else f"{value:.2f}{GAP}s" if 0.1 <= value < 10 else f"{value:.3g}{GAP}s"


def duration(value: float) -> str:
    """A short time in the unit that suits it: 3.21 s, 45.6 ms, 78.9 us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g}{GAP}{unit}"
    return f"{value * 1e6:.3g}{GAP}us"


def step_seconds(value: float) -> str:
    """Seconds of a step with three digits, or as many as whole seconds take."""
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f}" if value >= 0.1 else f"{value:#.3g}"


def step_time(value: float) -> str:
    """The same with its unit; short ones in milliseconds."""
    return f"{step_seconds(value)}{GAP}s" if value >= 0.1 else duration(value)


def over_mean(value: float) -> str:
    """A load over the mean, with as many decimals as tell it from 1."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested configuration as text by dotted key."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = "none" if value is None else str(value)
    return flat
