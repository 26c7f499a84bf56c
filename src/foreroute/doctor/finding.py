"""One thing that the doctor found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from foreroute.errors import printable


class Severity(IntEnum):
    """How bad a finding is."""

    FINE = 0
    NOTE = 1
    WARNING = 2
    PROBLEM = 3


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        severity: how bad it is.
        topic: "wiring", "weights", "routes", "masks", "indexers", "probabilities", "replay" or "trainer".
        sentence: what was seen, in plain words and whole sentences.
        advice: what to do, likewise; empty when there is nothing to do.
    """

    severity: Severity
    topic: str
    sentence: str
    advice: str = ""

    def __post_init__(self) -> None:
        """Paths, names of models and errors are quoted: on one line, and as a terminal shows and does not obey them."""
        object.__setattr__(self, "sentence", " ".join(printable(self.sentence).split()))
        object.__setattr__(self, "advice", " ".join(printable(self.advice).split()))


def many(count: int, unit: str) -> str:
    """Say how many of a unit there are."""
    return f"{count:,} {unit}{'' if count == 1 else 's'}"
