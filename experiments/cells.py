"""A cell of the grid: one thing to measure with one seed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from experiments.models import configuration

TRAINER_VERSION = 1
"""Of `foreroute.train` and of what is measured here. Whoever changes what a run computes or keeps raises it: results of
another version are out of date."""
Experiment = Literal["static", "noise", "served", "train", "routes"]


@dataclass(frozen=True)
class Cell:
    """One entry of the grid. Cells that differ in the seed alone are one arm.

    Attributes:
        arm: what it is called on the page, such as "B/R3/tis/8".
        experiment: "static" measures the mismatch at fixed weights, "noise" an engine against itself, "served" vLLM
            against itself, "train" is a run of RL, "routes" the loads of one.
        seed: of the weights, the problems and the samples.
        start: the name of the model that it starts from, in `models.py`.
        settings: sections of a configuration of `foreroute train` that differ from those in `models.py`.
        shifted: rotate the recorded routes by one token, which no trace of the product can be.
    """

    arm: str
    experiment: Experiment
    seed: int
    start: str
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    shifted: bool = False

    @property
    def name(self) -> str:
        """Unique in a grid."""
        return f"{self.arm}/{self.seed}"

    def digest(self, base: dict[str, Any]) -> str:
        """Give 16 hexadecimal digits of all that the figures follow from; a result counts while they stay the same.

        They cover the cell, every key of its configuration, defaults too, and `TRAINER_VERSION`.

        Args:
            base: the configuration of its start, which the settings go on top of.
        """
        whole = configuration(base, self.settings, self.seed).model_dump(mode="json")
        return _digits([asdict(self), whole, TRAINER_VERSION])

    def settings_digest(self, base: dict[str, Any]) -> str:
        """Give what a digest was until 2026-11-29: of the cell and the keys that its configuration names."""
        return _digits([asdict(self), base])


def _digits(what: list[Any]) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
