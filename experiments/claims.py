"""What the papers say, held against the figures: the claims of `claims.toml`, and the rule that gives every verdict."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments.arms import Arms, metric
from experiments.intervals import Interval, paired_ratio
from experiments.wording import interval_text

ENOUGH = 3
"""Seeds below which there is no verdict."""
VERDICTS = ("holds", "the opposite", "not shown", "too few seeds")


@dataclass(frozen=True)
class Claim:
    """One line of the table of claims.

    Attributes:
        claim: in words, with who says it.
        measured: the quantity, a comma, and what is compared.
        found: the estimate and its interval, in words.
        verdict: one of `VERDICTS`.
        seeds: how many.
    """

    claim: str
    measured: str
    found: str
    verdict: str
    seeds: int

    @property
    def quantity(self) -> str:
        """What is measured."""
        return self.measured.partition(", ")[0]

    @property
    def compared(self) -> str:
        """Of which arms, or of which part of them."""
        return self.measured.partition(", ")[2]


def claims(arms: Arms) -> list[Claim]:
    """Every claim for which at least one figure is there."""
    return [found for entry in entries() if (found := _judged(entry, arms)).seeds]


def verdict(interval: Interval | None, null: float, claimed: str) -> str:
    """By the 95 % interval of one comparison.

    Args:
        interval: of the difference or ratio.
        null: its value if there is no effect, 0 or 1; or a bound.
        claimed: "above" or "below" the null.
    """
    holds, opposite, not_shown, too_few = VERDICTS
    if interval is None or interval.seeds < ENOUGH:
        return too_few
    if not interval.excludes(null):
        return not_shown
    return holds if (interval.mean > null) == (claimed == "above") else opposite


@cache
def entries() -> list[dict[str, Any]]:
    """The claims of `claims.toml`, each with its names filled in."""
    given = tomllib.loads(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8"))["claim"]
    values = {entry["claim"]: entry["each"] for entry in given if "each" in entry}
    return [
        _filled(entry, dict(zip(each, taken, strict=True)))
        for entry in given
        for each in [values[entry["same_as"]] if "same_as" in entry else entry.get("each", {})]
        for taken in (zip(*each.values(), strict=True) if each else [()])
    ]


def _filled(entry: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(each) for each in value]
        return value.format(**values) if isinstance(value, str) else value

    return {key: fill(value) for key, value in entry.items() if key not in ("each", "same_as")}


def _judged(entry: dict[str, Any], arms: Arms) -> Claim:
    """The verdict of one claim; what is claimed is "above" unless it says otherwise."""
    claimed, measured, unit = entry.get("claimed", "above"), entry["measured"], ""
    of = entry["of"] if isinstance(entry["of"], list) else [entry["of"]]
    metrics = [metric(name) for name in of]
    interval: Interval | None
    if "ratio" in entry:
        null, unit = 1.0, " times"
        if len(entry["ratio"]) == 1:  # the figure is a ratio itself
            values = arms.values(*entry["ratio"], *metrics)
            interval = paired_ratio(values, dict.fromkeys(values, 1.0))
        else:
            interval = arms.ratio(*entry["ratio"], *metrics)
    elif "difference" in entry:
        null, interval = 0.0, arms.difference(*entry["difference"], *metrics)
    else:
        null, interval = entry["bound"], arms.mean(entry["arm"], *metrics)
        measured += f", {claimed} {null:g}"
    found = "" if interval is None else interval_text(interval, unit, signed=not null)
    seeds = 0 if interval is None else interval.seeds
    return Claim(entry["claim"], measured, found, verdict(interval, null, claimed), seeds)
