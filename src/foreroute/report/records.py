"""Reading run folders: `config.json` and `metrics.jsonl`, checked line by line. Nothing is computed or drawn here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from foreroute.errors import InputError, RunFolderError
from foreroute.mismatch import Alarm

Side = Literal["native", "replayed"]
"""How the trainer was routed when the mismatch was measured: by itself, or with the rollout's routes replayed."""

Load = Literal["at_home", "planned", "executed"]
"""Whose load of the ranks: every expert at its home, the plan's, or what ran."""

SIDES: tuple[Side, ...] = ("native", "replayed")


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """How far trainer and rollout engine were apart at one step. Shares are between 0 and 1."""

    k3: float
    f2: float
    differing_share: float
    differing_tokens_share: float
    differing_share_by_layer: tuple[float, ...] = ()
    differing_layers_histogram: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        layers, bins = len(self.differing_share_by_layer), len(self.differing_layers_histogram)
        if layers and bins and bins != layers + 1:
            raise ValueError(f"{layers} layers need a histogram of {layers + 1} counts, this one has {bins}")


@dataclass(frozen=True, kw_only=True)
class Margins:
    """Gaps between the K-th and (K+1)-th selection score: bin edges [n + 1] in log10, counts [L][n]."""

    log10_edges: tuple[float, ...]
    counts_LB: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        bins = len(self.log10_edges) - 1
        if not all(math.isfinite(edge) for edge in self.log10_edges):
            raise ValueError("log10_edges must be finite")
        if list(self.log10_edges) != sorted(set(self.log10_edges)):
            raise ValueError("log10_edges must ascend")
        if any(len(counts) != bins for counts in self.counts_LB):
            raise ValueError(f"{bins + 1} log10_edges need {bins} counts in every layer of counts_LB")


@dataclass(frozen=True, kw_only=True)
class StageLoads:
    """Assignments [M][L][G] of every rank in every cell of a stage: with experts at their homes, and as executed."""

    at_home_MLG: tuple[tuple[tuple[int, ...], ...], ...]
    executed_MLG: tuple[tuple[tuple[int, ...], ...], ...]

    def __post_init__(self) -> None:
        shapes = {_shape(self.at_home_MLG), _shape(self.executed_MLG)}
        if len(shapes) > 1 or None in shapes:
            raise ValueError("at_home_MLG and executed_MLG need the same numbers of micro-steps, layers and ranks")

    def of(self, load: Load) -> NDArray[np.int64]:
        """int64 [M, L, G]."""
        return np.array(self.at_home_MLG if load == "at_home" else self.executed_MLG, np.int64)

    @property
    def num_micro_steps(self) -> int:
        return len(self.executed_MLG)

    @property
    def num_cells(self) -> int:
        return self.num_micro_steps * len(self.executed_MLG[0])

    @property
    def num_ranks(self) -> int:
        return len(self.executed_MLG[0][0])


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How an expert-parallel step was executed. Without a plan there are no stages."""

    ranks: int
    max_over_mean: dict[Load, float] = field(default_factory=dict)
    replicas: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    cells_at_home: int = 0
    exposed_transfer_s: float = 0.0
    planning_s: float = 0.0
    exposed_planning_s: float = 0.0
    hidden_planning_share: float = 0.0
    stages: dict[str, StageLoads] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.stages and {"at_home", "executed"} - self.max_over_mean.keys():
            raise ValueError("max_over_mean needs at_home and executed where there are stages")
        if any(stage.num_ranks != self.ranks for stage in self.stages.values()):
            raise ValueError(f"stages need loads of {self.ranks} ranks")


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Probabilities of the trainer over the engine's on the trained tokens, and what a correction did about them."""

    effective_share: float
    cut_share: float
    rejected_sequences: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Rewards on held-out problems."""

    reward_mean: float
    responses: int


@dataclass(frozen=True, kw_only=True)
class RolledBack:
    """A return to an earlier checkpoint."""

    at_step: int
    to_step: int
    because: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """One line of `metrics.jsonl`. None or an empty mapping: not recorded at this step."""

    step: int
    seconds: dict[str, float] = field(default_factory=dict)
    reward_mean: float | None = None
    reward_failures: int = 0
    entropy: float | None = None
    grad_norm: float | None = None
    clip_share: float | None = None
    kl: float | None = None
    importance: Importance | None = None
    evaluation: Evaluation | None = None
    mismatch: dict[Side, Mismatch] = field(default_factory=dict)
    margins: Margins | None = None
    expert_load: dict[int, float] = field(default_factory=dict)
    live_agreement: tuple[float, ...] = ()
    alarms: tuple[Alarm, ...] | None = None
    execution: Execution | None = None


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
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    rollbacks: tuple[RolledBack, ...] = ()

    @property
    def trains_with(self) -> Side:
        """The side whose routes the update runs with."""
        return "replayed" if self.routing in ("R3", "R3+weights") else "native"

    def paired_steps(self) -> tuple[Step, ...]:
        """Steps at which both sides were measured, on the same rollouts and weights."""
        return tuple(step for step in self.steps if all(side in step.mismatch for side in SIDES))

    def steps_to_compare(self, side: Side) -> tuple[Step, ...]:
        """The paired steps; in a run that has none, every step at which `side` was measured."""
        return self.paired_steps() or tuple(step for step in self.steps if side in step.mismatch)


@dataclass(frozen=True)
class _Rollout:
    precision: str


@dataclass(frozen=True)
class _Rl:
    routing: str


@dataclass(frozen=True)
class _Config:
    name: str
    seed: int
    rollout: _Rollout
    rl: _Rl


_CONFIG = TypeAdapter(_Config)
_ANYTHING = TypeAdapter(dict[str, Any])
_STEP = TypeAdapter(Step)


@dataclass(frozen=True)
class _Rollbacks:
    rollbacks: tuple[RolledBack, ...]


_ROLLBACKS = TypeAdapter(_Rollbacks)


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
    content = _read_bytes(path)
    try:
        config, shown = _CONFIG.validate_json(content, strict=True), _ANYTHING.validate_json(content)
    except ValidationError as error:
        raise RunFolderError(f"{path} is damaged: {_reason(error)}. Restore it from a copy") from error
    steps, notes = _read_metrics(folder / "metrics.jsonl")
    return Run(
        folder=folder,
        label=config.name,
        name=config.name,
        seed=config.seed,
        precision=config.rollout.precision,
        routing=config.rl.routing,
        config=shown,
        steps=tuple(steps),
        notes=tuple(notes),
        rollbacks=_read_rollbacks(folder / "rollbacks.json"),
    )


def _read_rollbacks(path: Path) -> tuple[RolledBack, ...]:
    if not path.exists():
        return ()
    try:
        return _ROLLBACKS.validate_json(_read_bytes(path), strict=True).rollbacks
    except ValidationError as error:
        raise RunFolderError(f"{path} is damaged: {_reason(error)}. Restore it from a copy") from error


def _read_metrics(path: Path) -> tuple[list[Step], list[str]]:
    lines = [(number, line) for number, line in enumerate(_read_bytes(path).split(b"\n"), 1) if line.strip()]
    steps: list[Step] = []
    notes: list[str] = []
    shapes: dict[str, object] = {}
    for number, line in lines:
        try:
            step = _STEP.validate_json(line, strict=True)
            _check_like(shapes, step)
        except ValueError as error:
            if number == lines[-1][0] and _is_torn(error):
                notes.append(
                    f"Line {number} of {path.name} is half written, so the run was stopped there; it is left out."
                )
                break
            raise RunFolderError(
                f"{path}, line {number} is damaged: {_reason(error)}. "
                f"Restore the file from a copy, or delete line {number} to report on the other steps"
            ) from error
        if steps and step.step <= steps[-1].step:
            notes.append(
                f"The run was resumed at step {step.step}; the steps after that are those of the later attempt."
            )
            steps = [earlier for earlier in steps if earlier.step < step.step]
        steps.append(step)
    if not steps:
        raise RunFolderError(f"{path} holds no complete step; let the run finish at least one step")
    return steps, notes


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise RunFolderError(
            f"{path} does not exist; a run folder holds config.json and metrics.jsonl. Name one that training wrote"
        ) from error
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be read ({error.strerror}); check what it is and who may read it"
        ) from error


def _check_like(shapes: dict[str, object], step: Step) -> None:
    """Refuse a step of another model: layers and bins are summed over steps. `shapes` remembers what came first."""
    found: list[tuple[str, object]] = []
    for mismatch in step.mismatch.values():
        found += [("layers of differing_share_by_layer", len(mismatch.differing_share_by_layer))]
        found += [("bins of differing_layers_histogram", len(mismatch.differing_layers_histogram))]
    if step.margins:
        found += [("bins of log10_edges", step.margins.log10_edges)]
    for what, shape in found:
        if shape and shapes.setdefault(what, shape) != shape:
            raise ValueError(f"the {what} are {shape}, on earlier lines they are {shapes[what]}")


def _shape(loads_MLG: tuple[tuple[tuple[int, ...], ...], ...]) -> tuple[int, int, int] | None:
    """M, L and G, or None when they are uneven or 0."""
    layers = {len(cells) for cells in loads_MLG}
    ranks = {len(cell) for cells in loads_MLG for cell in cells}
    even = len(layers) == len(ranks) == 1 and min(layers) > 0 and min(ranks) > 0
    return (len(loads_MLG), min(layers), min(ranks)) if even else None


def _is_torn(error: ValueError) -> bool:
    return isinstance(error, ValidationError) and error.errors()[0]["type"] == "json_invalid"


def _reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else first["msg"]
