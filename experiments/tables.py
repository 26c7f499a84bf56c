"""Tables of the pages: figures, each with how it is shown, in rows and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from experiments.arms import Arms, Measure
from experiments.intervals import Interval, interval_text, mean_text


@dataclass(frozen=True)
class Shown:
    """The mean of a measure over seeds, as `how` writes it."""

    measure: Measure
    how: Callable[[Interval], str] = mean_text

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that it is made of."""
        return (self.measure.arm,)

    def text(self, arms: Arms) -> str:
        """Write it."""
        return self.how(arms.mean(self.measure))


@dataclass(frozen=True)
class Apart:
    """One measure minus another, within seeds."""

    first: Measure
    second: Measure

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that it is made of."""
        return self.first.arm, self.second.arm

    def text(self, arms: Arms) -> str:
        """Write it."""
        return interval_text(arms.difference(self.first, self.second), signed=True)


@dataclass(frozen=True)
class Collapsed:
    """Runs of some arms that collapsed, of how many."""

    arms: tuple[str, ...]

    def text(self, arms: Arms) -> str:
        """Write both numbers."""
        collapsed, runs = (sum(counts) for counts in zip(*map(arms.collapsed, self.arms), strict=True))
        return f"{collapsed}/{runs}" if runs else "-"


Part = str | Shown | Apart | Collapsed
Row = tuple[Part | tuple[Part, ...], ...]
"""One cell for each column. A cell of several parts has semicolons between them."""


class Table:
    """A table of `results.md` or `evidence.md`, with all rows, also those without a result."""

    def __init__(self, columns: Iterable[str], rows: Iterable[Row]) -> None:
        self.columns, self.rows = list(columns), list(rows)

    def lines(self, arms: Arms) -> list[list[str]]:
        """Write the rows for which there is any result."""
        return [[_written(cell, arms) for cell in row] for row in self.rows if any(_known(cell, arms) for cell in row)]


def _parts(cell: Part | tuple[Part, ...]) -> tuple[Part, ...]:
    return cell if isinstance(cell, tuple) else (cell,)


def _known(cell: Part | tuple[Part, ...], arms: Arms) -> bool:
    """Say whether there is a result of an arm of a cell; text has no arms."""
    return any(arm in arms for part in _parts(cell) if not isinstance(part, str) for arm in part.arms)


def _written(cell: Part | tuple[Part, ...], arms: Arms) -> str:
    return "; ".join(part if isinstance(part, str) else part.text(arms) for part in _parts(cell))
