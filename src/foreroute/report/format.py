"""Looks of numbers and settings in tables, sentences and plots. Pure text; escaping is the page's."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from foreroute.files.toml import by_key

ABSENT = "–"  # noqa: RUF001  an en dash in a table cell: never measured
GAP = "\N{NO-BREAK SPACE}"
SIZES = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
TIMES = "\N{MULTIPLICATION SIGN}"

AS_FAST = 1.005
"""Largest factor between times that are called as fast."""
WINDOW = 10
"""Steps at each end of a run whose reward is averaged."""

INK, GREY = "#3b4550", "#8a94a0"
"""Colours of words in a picture, and of lines that only guide the eye."""
STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 11,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # shipped with matplotlib, so pages look alike everywhere
    "font.size": 11,
    "grid.color": "#e6e9ed",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "path.simplify_threshold": 0.6,  # of a point
    "svg.fonttype": "path",
    "svg.hashsalt": "foreroute",  # the same records give the same page
    "xtick.color": GREY,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 10.5,
    "ytick.color": GREY,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 10.5,
}
"""The look of all plots, for matplotlib."""


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
    digits = ".1f" if abs(percent) >= 10 else ".2f" if abs(percent) >= 0.1 else ".1g"
    return f"{percent:{digits}}{GAP}%"


def scientific(value: float | None) -> str:
    """0.00123 -> 1.23e-3."""
    if value is None:
        return ABSENT
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def duration(value: float) -> str:
    """A short time in the unit that suits it: 3.21 s, 45.6 ms, 78.9 us."""
    unit, size = time_unit(value)
    return f"{value / size:.3g}{GAP}{unit}"


def step_time(value: float | None) -> str:
    """The seconds of a step with three digits, or as many as whole ones take; short ones in milliseconds."""
    if value is None:
        return ABSENT
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{decimals}f}{GAP}s" if value >= 0.1 else duration(value)


def rate(name: str, value: float | str) -> str:
    """Write the value of a key of a topology file, in the unit that its name tells."""
    if not value or isinstance(value, str) or not name.endswith(("_s", "_s_per_count")):
        return f"{value:g}" if isinstance(value, float) else f"{value}"
    for ending, one, unit in (("_flops_per_s", 1e12, "TFLOP/s"), ("_bytes_per_s", 1e9, "GB/s")):
        if name.endswith(ending):
            return f"{value / one:,.4g} {unit}"
    return duration(value)


def size(value: float) -> str:
    """Bytes in the unit that suits them: 1.23 GB, 45.6 MB, 789 B."""
    unit, one = next(((unit, one) for unit, one in SIZES.items() if value >= one), ("B", 1))
    return f"{value / one:.3g}{GAP}{unit}"


def time_unit(most_s: float) -> tuple[str, float]:
    """The unit that suits an axis of times up to `most_s`, and its seconds."""
    return next(((unit, size) for unit, size in UNITS.items() if most_s >= size), ("us", 1e-6))


def times(ratio: float) -> str:
    """A gain, as 1.23 and the sign of multiplication."""
    return f"{ratio:.2f}{TIMES}"


def as_fast(other_s: float, this_s: float) -> str:
    """Speed of something beside another whose seconds come first; the other's name follows."""
    ratio = other_s / this_s
    return "as fast as" if 1 / AS_FAST <= ratio <= AS_FAST else f"{ratio:.2f} times as fast as"


def over_mean(value: float) -> str:
    """A load over the mean, with as many decimals as tell it from 1."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def quoted(path: Path) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))


def flattened(config: Mapping[str, Any]) -> dict[str, str]:
    """A nested configuration as text by dotted key."""
    return {key: "none" if value is None else _setting(value) for key, value in by_key(config).items()}


def _setting(value: object) -> str:
    """Give 6e+14 in the place of 600000000000000.0; no digit is lost."""
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else str(value)


def span_of(values: Iterable[Any], show: Callable[[Any], str]) -> str:
    """The least and the most in words, or the one value where both are shown alike."""
    known = [value for value in values if value is not None]
    if not known:
        return ABSENT
    # as shown: values that differ in unseen digits are one value to a reader
    low, high = show(min(known)), show(max(known))
    return low if low == high else f"{low} to {high}"
