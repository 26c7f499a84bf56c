"""Reading run folders: configuration and metrics, checked line by line. Nothing is computed or drawn here."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import AliasPath, BaseModel, Field, TypeAdapter, ValidationError

from foreroute.errors import InputError, RunFolderError, TraceFileError
from foreroute.files import read_file
from foreroute.records.step_record import SIDES, Side, StepRecord, parse_step, why_invalid
from foreroute.trace import RoutedLayer, load


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run folder holds: its configuration, its steps in order, and what the reader should know about it."""

    folder: Path
    label: str
    name: str
    seed: int
    precision: str
    routing: str
    config: dict[str, Any]
    steps: tuple[StepRecord, ...]
    layers: tuple[RoutedLayer, ...] = ()
    """The model's routed layers, as the run's traces number them; none where it kept no trace."""
    notes: tuple[str, ...] = ()

    @property
    def trains_with(self) -> Side:
        """The side whose routes the update runs with."""
        return "replayed" if self.routing in ("R3", "R3+weights") else "native"

    def paired_steps(self) -> tuple[StepRecord, ...]:
        """Steps at which both sides were measured, on the same rollouts and weights."""
        return tuple(step for step in self.steps if all(side in step.get("mismatch", {}) for side in SIDES))

    def steps_to_compare(self, side: Side) -> tuple[StepRecord, ...]:
        """The paired steps; in a run that has none, every step at which `side` was measured."""
        return self.paired_steps() or tuple(step for step in self.steps if side in step.get("mismatch", {}))


class _Facts(BaseModel, strict=True):
    """What a configuration says of a run; its other keys are passed over."""

    name: str
    seed: int
    precision: str = Field(validation_alias=AliasPath("rollout", "precision"))
    routing: str = Field(validation_alias=AliasPath("rl", "routing"))


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders in the given order. Runs of one name get their folder's name added to their label.

    Raises:
        InputError: when no folder is given.
        RunFolderError: when a folder or file is missing or damaged.
    """
    if not folders:
        raise InputError("no run folder was given; name at least one")
    runs = [read_run(Path(folder)) for folder in folders]
    names = Counter(run.name for run in runs)
    runs = [replace(run, label=f"{run.name} ({run.folder.name})") if names[run.name] > 1 else run for run in runs]
    labels = Counter(run.label for run in runs)
    return [
        replace(run, label=f"{run.label} #{position}") if labels[run.label] > 1 else run
        for position, run in enumerate(runs, 1)
    ]


def read_run(folder: Path) -> Run:
    """Read one run folder. A last line that a killed run left half written is dropped and noted.

    Raises:
        RunFolderError: when the folder or a file is missing, a line is damaged, or there is no complete step.
    """
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not a folder; name the folder that a training run wrote")
    path = folder / "config.json"
    if not os.path.lexists(path):
        raise RunFolderError(
            f"{path} does not exist; a run folder holds config.json and metrics.jsonl. Name one that training wrote"
        )
    try:
        config = TypeAdapter(dict[str, Any]).validate_json(read_file(path, RunFolderError))
        facts = _Facts.model_validate(config)
    except ValidationError as error:
        raise RunFolderError(f"{path} is damaged: {why_invalid(error)}. Restore it from a copy") from error
    steps, notes = _read_metrics(folder / "metrics.jsonl")
    layers, unread = _read_layers(folder / "rollouts")
    return Run(
        folder=folder,
        label=facts.name,
        config=config,
        steps=tuple(steps),
        layers=layers,
        notes=(*notes, *unread),
        **facts.model_dump(),
    )


def _read_metrics(path: Path) -> tuple[list[StepRecord], list[str]]:
    """The steps, and a note where the last line is half written."""
    content = read_file(path, RunFolderError).split(b"\n")
    lines = [(number, line) for number, line in enumerate(content, 1) if line.strip()]
    steps: list[StepRecord] = []
    notes: list[str] = []
    shapes: dict[str, object] = {}
    for number, line in lines:
        try:
            step = parse_step(line)
            _check_like(shapes, step)
            if step["step"] != len(steps):
                raise ValueError(f"its step is {step['step']}, expected {len(steps)}")
            steps.append(step)
        except ValueError as error:
            torn = isinstance(error, ValidationError) and error.errors()[0]["type"] == "json_invalid"
            if not torn or number < lines[-1][0]:
                raise RunFolderError(
                    f"{path}, line {number} is damaged: {why_invalid(error)}. Restore the file from a copy, or remove "
                    f"line {number} and those after it to report on the steps before"
                ) from error
            notes = [f"Line {number} of {path.name} is half written, so the run was stopped there; it is left out."]
    if not steps:
        raise RunFolderError(f"{path} holds no complete step; let the run finish at least one step")
    return steps, notes


def _read_layers(rollouts: Path) -> tuple[tuple[RoutedLayer, ...], list[str]]:
    """The layers of the first rollout's trace, and a note where it cannot be read."""
    for path in sorted(rollouts.glob("step-*.trace.safetensors"))[:1]:
        try:
            return load(path, sequences=[]).spec.layers, []
        except TraceFileError as error:
            return (), [f"The numbers of the layers are not known: {error}"]
    return (), []


def _check_like(shapes: dict[str, object], step: StepRecord) -> None:
    """Refuse a step of another model: layers and bins are summed over steps. `shapes` remembers what came first."""
    found: list[tuple[str, object]] = []
    for mismatch in step.get("mismatch", {}).values():
        found += [("layers of differing_share_by_layer", len(mismatch.get("differing_share_by_layer", ())))]
    if margins := step.get("margins"):
        found += [("bins of log10_edges", tuple(margins["log10_edges"]))]
    for what, shape in found:
        if shape and shapes.setdefault(what, shape) != shape:
            raise ValueError(f"the {what} are {shape}, on earlier lines they are {shapes[what]}")
