"""Claims, and the rule that gives its verdict, which was fixed before any run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from experiments.arms import Arms, Measure
from experiments.intervals import Interval, interval_text

ENOUGH = 3
"""Seeds below which there is no verdict."""
VERDICTS = ("holds", "the opposite", "not shown", "too few seeds")
Side = Literal["above", "below"]


@dataclass(frozen=True)
class Ratio:
    """One measure over another, within seeds; alone the first is a ratio itself."""

    first: Measure
    second: Measure | None = None
    null: float = 1.0

    def interval(self, arms: Arms) -> Interval | None:
        """Estimate it; None where a figure is not positive."""
        return arms.ratio(self.first, self.second)


@dataclass(frozen=True)
class Difference:
    """One measure minus another, within seeds."""

    first: Measure
    second: Measure
    null: float = 0.0

    def interval(self, arms: Arms) -> Interval:
        """Estimate it."""
        return arms.difference(self.first, self.second)


@dataclass(frozen=True)
class Level:
    """A measure that is held against a bound, which stood before the runs."""

    first: Measure
    null: float

    def interval(self, arms: Arms) -> Interval:
        """Estimate it."""
        return arms.mean(self.first)


@dataclass(frozen=True)
class Claim:
    """A comparison of arms that somebody makes a claim of, in words, and the side of `effect.null` that is claimed."""

    words: str
    quantity: str
    compared: str
    effect: Ratio | Difference | Level
    side: Side = "above"


class Judged(NamedTuple):
    """One line of the table of claims: the claim in words, the estimate in words, its verdict, and how many seeds."""

    claim: str
    quantity: str
    compared: str
    found: str
    verdict: str
    seeds: int


def judged(claims: Sequence[Claim], arms: Arms) -> list[Judged]:
    """Judge every claim for which at least one figure is there."""
    return [found for claim in claims if (found := _judged(claim, arms)).seeds]


def verdict(interval: Interval | None, null: float, side: Side) -> str:
    """Judge the 95 % interval of one comparison; `null` is its value without effect, 0 or 1, or a bound."""
    holds, opposite, not_shown, too_few = VERDICTS
    if interval is None or interval.seeds < ENOUGH:
        return too_few
    if not interval.excludes(null):
        return not_shown
    return holds if (interval.mean > null) == (side == "above") else opposite


def _judged(claim: Claim, arms: Arms) -> Judged:
    effect, interval = claim.effect, claim.effect.interval(arms)
    compared = f"{claim.compared}, {claim.side} {effect.null:g}" if isinstance(effect, Level) else claim.compared
    unit = " times" if isinstance(effect, Ratio) else ""
    # the sign of a difference says which arm has more, and so does a bound of 0
    found = "" if interval is None else interval_text(interval, unit, signed=effect.null == 0)
    seeds = 0 if interval is None else interval.seeds
    return Judged(claim.words, claim.quantity, compared, found, verdict(interval, effect.null, claim.side), seeds)
