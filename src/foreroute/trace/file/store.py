"""The traces of a run: a folder to which whole files are added, one per step, and nothing is ever changed.

A shard is written under a temporary name and gets its own when it is complete, so that a process killed at any point
leaves whole shards and at most one leftover, which is named when the store is next opened.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from foreroute.errors import TraceFileError, printable
from foreroute.trace.container import RoutingTrace
from foreroute.trace.file.codec import CodecName
from foreroute.trace.file.reading import load
from foreroute.trace.file.writing import save
from foreroute.trace.spec import RoutedLayer

SHARD = re.compile(r"step-(\d{6}|[1-9]\d{6,})\.safetensors", re.ASCII)
"""A step has one name, and a training run gives its traces the same ones."""


class TraceStore:
    """An append-only folder of trace files.

    Attributes:
        folder: where the shards are; made when the first one is written.
        leftovers: what was in the folder and is no shard when the store was opened, such as the unfinished file of a
            killed process. Opening warns of them by name; they are never read and never deleted here.
    """

    def __init__(self, folder: str | os.PathLike[str], *, codec: CodecName = "packed") -> None:
        """Open a store, or prepare one.

        Args:
            folder: of the shards.
            codec: for what is appended, as in `save`.

        Raises:
            TraceFileError: when `folder` is a file, or cannot be listed.
        """
        self.folder = Path(folder)
        self._codec = codec
        self.leftovers = tuple(path for path in sorted(self._files()) if not SHARD.fullmatch(path.name))
        if self.leftovers:
            listed = printable(", ".join(path.name for path in self.leftovers))
            warnings.warn(
                f"{printable(self.folder)} holds files that are no complete trace: {listed}. A process was probably "
                "killed while writing; delete them when no other process is writing there",
                stacklevel=2,
            )

    @property
    def steps(self) -> list[int]:
        """The steps that are there, ascending."""
        matches = (SHARD.fullmatch(path.name) for path in self._files())
        return sorted(int(match[1]) for match in matches if match)

    def __len__(self) -> int:
        """The number of shards."""
        return len(self.steps)

    def __iter__(self) -> Iterator[tuple[int, RoutingTrace]]:
        """Steps and traces in order of step.

        Raises:
            TraceFileError: at a damaged shard, naming it. `damaged` lists them all without stopping.
        """
        for step in self.steps:
            yield step, self.load(step)

    def append(self, trace: RoutingTrace, *, step: int) -> Path:
        """Write the trace of a step; it is on disk in whole when this returns.

        Raises:
            TraceFileError: when the step is no whole number from 0, is there already, or cannot be written.
        """
        return save(trace, self.path(step), codec=self._codec)

    def load(
        self,
        step: int,
        *,
        sequences: ArrayLike | None = None,
        layers: Iterable[RoutedLayer] | None = None,
        streams: Iterable[str] | None = None,
    ) -> RoutingTrace:
        """Read the trace of a step, or a part of it, as `foreroute.load`.

        Raises:
            TraceFileError: when there is no such step, or its shard is damaged.
        """
        if not os.path.exists(self.path(step)):
            raise TraceFileError(f"{self.folder} has no step {step}; it has {_summary(self.steps)}")
        return load(self.path(step), sequences=sequences, layers=layers, streams=streams)

    def damaged(self) -> dict[Path, str]:
        """Read all shards, and return those that cannot be read, and why."""
        found = {}
        for step in self.steps:
            try:
                self.load(step)
            except TraceFileError as error:
                found[self.path(step)] = str(error)
        return found

    def path(self, step: int) -> Path:
        """Return the file of a step.

        Raises:
            TraceFileError: when the step is no whole number from 0.
        """
        if not isinstance(step, int | np.integer) or isinstance(step, bool) or step < 0:
            raise TraceFileError(f"step is {step!r}; steps count from 0, in whole numbers")
        return self.folder / f"step-{step:06d}.safetensors"

    def _files(self) -> list[Path]:
        try:
            return list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise TraceFileError(f"{self.folder} is a file; a trace store is a folder") from error
        except OSError as error:
            raise TraceFileError(f"{self.folder} cannot be listed ({error.strerror})") from error


def _summary(steps: list[int]) -> str:
    if not steps:
        return "none"
    return f"{len(steps)} from {steps[0]} to {steps[-1]}"
