"""Reading run folders: configuration and metrics, checked line by line. Nothing is computed or drawn here."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from foreroute.errors import ConfigError, InputError, RunFolderError, shown
from foreroute.files.config_file import checked
from foreroute.files.regular import as_path, parse_json, read_file
from foreroute.files.toml import by_key
from foreroute.records.step_record import SIDES, MismatchRecord, Side, StepRecord


@dataclass(frozen=True, kw_only=True)
class Run:
    """Content of one run folder: its configuration, its steps in order, and notes for the reader."""

    folder: Path
    label: str
    name: str
    routing: str
    config: dict[str, Any]
    steps: tuple[StepRecord, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def trains_with(self) -> Side:
        """The side whose routes the update runs with."""
        return "replayed" if self.routing == "R3" else "native"

    @cached_property
    def num_paired(self) -> int:
        """Steps at which both sides were measured, on the same rollouts and weights."""
        return sum(len(step.mismatch) == len(SIDES) for step in self.steps)

    @cached_property
    def measured(self) -> dict[Side, list[MismatchRecord]]:
        """The mismatch by side at the paired steps; in a run that has none, at every step at which it was measured."""
        least = len(SIDES) if self.num_paired else 1
        found = [step.mismatch for step in self.steps if len(step.mismatch) >= least]
        return {side: [each[side] for each in found if side in each] for side in SIDES}


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders in the given order. Runs of one name get their place added to their label.

    Raises:
        InputError: when no folder is given.
        RunFolderError: when a folder or file is missing, a line is damaged, or there is no complete step.
    """
    if not folders or isinstance(folders, str | os.PathLike):  # of a name, the letters would be folders
        raise InputError(f"no run folder was given, but {shown(folders)}; expected a list of one or more")
    runs = [read_run(folder) for folder in folders]
    names = Counter(run.name for run in runs)
    return [
        replace(run, label=f"{run.name} #{position}") if names[run.name] > 1 else run
        for position, run in enumerate(runs, 1)
    ]


def read_run(folder: Path) -> Run:
    """Read one run folder. A last line that a killed run left half written is dropped and noted."""
    folder = as_path(folder, RunFolderError)
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not a folder; name the folder that a training run wrote")
    path, metrics = folder / "config.json", folder / "metrics.jsonl"
    # a broken link is there too, and is refused as what cannot be read
    for each in (path, metrics):
        if not os.path.lexists(each):
            raise RunFolderError(
                f"{each} does not exist; a run folder holds config.json and metrics.jsonl. Name one that training wrote"
            )
    try:
        config = parse_json(read_file(path, RunFolderError), RunFolderError, name="it")
        flat = by_key(config) if isinstance(config, dict) else {}
        name, routing = flat.get("name"), flat.get("rl.routing")
        if not (isinstance(name, str) and isinstance(routing, str)):
            raise RunFolderError(f"its name is {shown(name)}, and its rl.routing {shown(routing)}; expected text")
    except RunFolderError as error:
        raise RunFolderError(f"{path} is damaged: {error}. Restore it from a copy") from error
    steps, is_torn = read_steps(metrics)
    if not steps:
        raise RunFolderError(f"{metrics} holds no complete step; let the run finish at least one step")
    torn = f"Line {len(steps) + 1} of {metrics.name} is half written, so the run was stopped there; it is left out."
    return Run(
        folder=folder,
        label=name,
        name=name,
        routing=routing,
        config=config,
        steps=tuple(steps),
        notes=(torn,) if is_torn else (),
    )


def read_steps(path: Path) -> tuple[list[StepRecord], bool]:
    """Read the finished steps in a `metrics.jsonl`, from 0 on, and say whether a step after them is half written."""
    steps: list[StepRecord] = []
    layers: set[tuple[str, ...]] = set()
    # each step ends its line, so that only a killed run leaves text behind the last newline
    *lines, last = read_file(path, RunFolderError).split(b"\n")
    for number, line in enumerate([*lines, last] if last.strip() else lines):
        try:
            step = parse_step(line)
            if step.step != number:
                raise RunFolderError(f"its step is {step.step}, expected {number}")
            # shares of layers are averaged over steps
            layers |= {tuple(side.differing_share_by_layer) for side in step.mismatch.values()} - {()}
            if len(layers) > 1:
                raise RunFolderError("differing_share_by_layer is of other layers than before")
        except RunFolderError as error:
            # a write that was cut ends inside of the JSON
            if number == len(lines) and isinstance(error.__cause__, json.JSONDecodeError | UnicodeDecodeError):
                return steps, True
            raise RunFolderError(
                f"{path}, line {number + 1} is damaged: {error}. Restore the file from a copy, or remove line "
                f"{number + 1} and those after it; to resume the run, remove the checkpoints of later steps too"
            ) from error
        steps.append(step)
    return steps, False


def parse_step(line: bytes) -> StepRecord:
    """Read one line of `metrics.jsonl`."""
    values = parse_json(line, RunFolderError, name="it")
    try:
        return checked(StepRecord, values, source="it")
    except ConfigError as error:
        raise RunFolderError(str(error)) from error
