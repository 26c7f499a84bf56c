"""A cell of the grid: one thing to measure with one seed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["static", "noise", "served", "train", "routes"]


@dataclass(frozen=True)
class Cell:
    """One entry of the grid. Cells that differ in the seed alone are one arm.

    Attributes:
        arm: what it is called on the page, such as "B/R3/tis/8".
        kind: "static" measures the mismatch at fixed weights, "noise" an engine against itself, "served" vLLM against
            itself, "train" is a run of RL, "routes" the loads of one.
        seed: of the weights, the problems and the samples.
        start: the name of the model that it starts from, in `models.py`.
        settings: sections of a configuration of `foreroute train` that differ from those in `models.py`.
        shifted: rotate the recorded routes by one token, which no trace of the product can be.
    """

    arm: str
    kind: Kind
    seed: int
    start: str
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    shifted: bool = False

    @property
    def name(self) -> str:
        """Unique in a grid."""
        return f"{self.arm}/{self.seed}"

    def digest(self, base: dict[str, Any]) -> str:
        """What was asked for, in 16 hexadecimal digits; a finished cell counts only while this stays the same.

        Args:
            base: the configuration of its start, which the settings go on top of.
        """
        text = json.dumps([asdict(self), base], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
