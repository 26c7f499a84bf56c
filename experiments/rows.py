"""A line of the table of claims: what was found, and the verdict, by a rule fixed before the runs."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.intervals import Interval
from experiments.wording import interval_text

ENOUGH = 3
"""Seeds below which there is no verdict."""

VERDICTS = ("holds", "the opposite", "not shown", "too few seeds")


@dataclass(frozen=True)
class Row:
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


def ratio_row(claim: str, measured: str, interval: Interval | None, claimed: str) -> Row:
    """Of a ratio, which is 1 where there is no effect."""
    return _row(claim, measured, interval, 1.0, claimed, " times")


def difference_row(claim: str, measured: str, interval: Interval, claimed: str) -> Row:
    """Of a difference, which is 0 where there is no effect."""
    return _row(claim, measured, interval, 0.0, claimed, "")


def bound_row(claim: str, measured: str, interval: Interval, bound: float, claimed: str) -> Row:
    """Of a figure that is claimed to lie above or below a bound."""
    return _row(claim, f"{measured}, {claimed} {bound:g}", interval, bound, claimed, "")


def _row(claim: str, measured: str, interval: Interval | None, null: float, claimed: str, unit: str) -> Row:
    found = "" if interval is None else interval_text(interval, unit, signed=not null)
    return Row(claim, measured, found, verdict(interval, null, claimed), 0 if interval is None else interval.seeds)
