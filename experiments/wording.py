"""Numbers in words."""

from __future__ import annotations

import math

from experiments.intervals import Interval


def number(value: float, digits: int = 3) -> str:
    """So many significant digits, with an exponent below a ten thousandth."""
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1e}" if abs(value) < 1e-4 else f"{value:.{digits}g}"


def interval_text(interval: Interval, unit: str = "", *, signed: bool = False) -> str:
    """The mean and, from two seeds on, the interval's ends; with more digits where three show all of them alike."""
    sign = "+" if signed and interval.mean > 0 else ""
    if math.isnan(interval.low):
        return f"{sign}{number(interval.mean)}{unit}"
    for digits in (3, 4, 5, 6):
        mean, low, high = (number(value, digits) for value in (interval.mean, interval.low, interval.high))
        if low != high or interval.low == interval.high:
            break
    return f"{sign}{mean}{unit} [{low}, {high}]"


def percent(value: float) -> str:
    """A share, of two significant digits."""
    return "-" if not math.isfinite(value) else "0 %" if value == 0 else f"{100 * value:.2g} %"
