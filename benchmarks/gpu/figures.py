"""Tools of a part of the figures. A part is a module with a function `run(figures)`."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.harness.pairs import PairedRatio


class Figures:
    """Figures by name, printed anew whenever one is added: what ends the process leaves what was found.

    `full` are the sizes that the part is about; small ones, for seconds on two cores, otherwise.
    """

    def __init__(self, device: torch.device, ends_at: float) -> None:
        self.device = device
        self.full = device.type == "cuda"
        self.found: dict[str, Any] = {}
        self._ends_at = ends_at

    @property
    def seconds_left(self) -> float:
        """A part does with fewer repeats when few are left."""
        return self._ends_at - time.monotonic()

    def record(self, **figures: Any) -> None:
        """Keep figures, in the units that their names end with."""
        # whoever reads this process takes the last line, whatever ends it
        self.found.update(figures)
        self.show("")

    def show(self, outcome: str) -> None:
        """One line of JSON, with the outcome of the part where it is known."""
        print(json.dumps({"outcome": outcome, "figures": self.found}), flush=True)

    def record_ratio(self, name: str, found: PairedRatio) -> None:
        """Keep the median and the quartiles of a ratio."""
        self.record(
            **{
                f"{name}_ratio": round(found.ratio, 4),
                f"{name}_ratio_quartiles": [round(found.low, 4), round(found.high, 4)],
            }
        )

    def record_quartiles(self, name: str, values: Sequence[float]) -> tuple[float, float, float]:
        """Keep the median and the quartiles of values. Returns all three."""
        low, median, high = (round(value, 4) for value in statistics.quantiles(values, n=4))
        self.record(**{name: median, f"{name}_quartiles": [low, high]})
        return low, median, high

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds of one call, with all that it launches."""
        self.synchronize()
        begun = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begun
