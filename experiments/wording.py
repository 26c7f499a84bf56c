"""Numbers in words."""

from __future__ import annotations

import math

from experiments.intervals import Interval


def number(value: float) -> str:
    """Three significant digits, with an exponent below a ten thousandth."""
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1e}" if abs(value) < 1e-4 else f"{value:.3g}"


def interval_text(interval: Interval, unit: str = "", *, signed: bool = False) -> str:
    """The mean and, from two seeds on, the interval's ends."""
    sign = "+" if signed and interval.mean > 0 else ""
    mean = f"{sign}{number(interval.mean)}{unit}"
    if math.isnan(interval.low):
        return mean
    return f"{mean} [{number(interval.low)}, {number(interval.high)}]"


def percent(value: float) -> str:
    """A share, of two significant digits."""
    return "-" if not math.isfinite(value) else "0 %" if value == 0 else f"{100 * value:.2g} %"
