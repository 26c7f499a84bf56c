"""What a part of the GPU proof works with. A part is a module with a function `run(part)`, in a process of its own."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

Figure = float | int | str | bool | list[float] | list[str] | None


class Skipped(Exception):  # noqa: N818 - it is no error
    """What was to be checked cannot run here; the message says why."""


@dataclass
class Part:
    """One part as it runs. Its file is written anew after every check: what ends the process leaves what was found.

    Attributes:
        name: of the part.
        device: where to work.
        full: at the sizes that the part is about; small ones, for seconds on two cores, otherwise.
        figures: what was measured, by name.
        checks: of every check its outcome: "passed", "failed: why" or "skipped: why".
    """

    name: str
    device: torch.device
    full: bool
    ends_at: float
    file: Path
    figures: dict[str, Figure] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)

    @property
    def seconds_left(self) -> float:
        """Until the part is ended from outside. A part that measures does with fewer repeats when few are left."""
        return self.ends_at - time.monotonic()

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """A thing that must hold: what is raised inside fails it (or skips it, if `Skipped`), and the part goes on.

        Raises:
            Skipped: when the part's time is used up. It ends the part: checks stand in the order of their weight.
        """
        if self.seconds_left <= 0:
            raise Skipped(f"the part's time was used up before {name}")
        try:
            yield
        except Skipped as skipped:
            outcome = f"skipped: {skipped}"
        except Exception as error:  # whatever a broken check raises is its outcome
            traceback.print_exc()
            outcome = f"failed: {type(error).__name__}: {str(error).strip()[:500]}"
        else:
            outcome = "passed"
        self.checks[name] = outcome
        self.save()

    def record(self, **figures: Figure) -> None:
        """Keep figures, in the units that their names end with."""
        self.figures.update(figures)
        self.save()

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

    def save(self) -> None:
        """Whole or not at all."""
        text = json.dumps({"outcome": self.outcome, "checks": self.checks, "figures": self.figures})
        new = self.file.with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        os.replace(new, self.file)

    @property
    def outcome(self) -> str:
        """Of the part: that of its checks together."""
        failed = [f"{name}: {why.removeprefix('failed: ')}" for name, why in self.checks.items() if "failed" in why[:6]]
        if failed:
            return f"failed: {'; '.join(failed)}"
        skipped = [f"{name}: {why.removeprefix('skipped: ')}" for name, why in self.checks.items() if why != "passed"]
        if len(skipped) == len(self.checks):
            return f"skipped: {'; '.join(skipped) or 'it checked nothing'}"
        return "passed"
