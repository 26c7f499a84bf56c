"""What run folders hold, as `reading.py` finds it there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray
from pydantic import AfterValidator

from foreroute.mismatch import Alarm

Side = Literal["native", "replayed"]
"""How the trainer was routed when the mismatch was measured: by itself, or with the rollout's routes replayed."""

Load = Literal["at_home", "planned", "executed"]
"""Whose load of the ranks: every expert at its home, the plan's, or what ran."""

SIDES: tuple[Side, ...] = ("native", "replayed")


ROUNDED = 1e-6
"""A share that is a quotient of sums may end so far outside."""


def _share(value: float) -> float:
    if value < -ROUNDED or value > 1 + ROUNDED:
        raise ValueError(f"it is {value}; expected a share from 0 to 1")
    return value


Share = Annotated[float, AfterValidator(_share)]
"""From 0 to 1, or NaN: a share of nothing."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """How far trainer and rollout engine were apart at one step. Shares are between 0 and 1."""

    k3: float
    f2: Share
    differing_share: Share
    differing_tokens_share: Share
    differing_share_by_layer: tuple[Share, ...] = ()
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
class ExecutionRecord:
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
class ImportanceRecord:
    """Probabilities of the trainer over the engine's on the trained tokens, and what a correction did about them."""

    effective_share: Share
    cut_share: Share
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
class Device:
    """Where a step ran; `peak_memory_bytes` is the most that tensors took on any rank, None on the CPU."""

    kind: str
    name: str
    peak_memory_bytes: Annotated[int, Ge(0)] | None = None


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One line of `metrics.jsonl`. None or an empty mapping: not recorded at this step."""

    step: int
    seconds: dict[str, float] = field(default_factory=dict)
    reward_mean: float | None = None
    reward_failures: int = 0
    entropy: float | None = None
    grad_norm: float | None = None
    clip_share: Share | None = None
    kl: float | None = None
    importance: ImportanceRecord | None = None
    evaluation: Evaluation | None = None
    mismatch: dict[Side, Mismatch] = field(default_factory=dict)
    margins: Margins | None = None
    expert_load: dict[int, float] = field(default_factory=dict)
    live_agreement: tuple[float, ...] = ()
    alarms: tuple[Alarm, ...] | None = None
    execution: ExecutionRecord | None = None
    device: Device | None = None


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
    notes: tuple[str, ...] = ()
    rollbacks: tuple[RolledBack, ...] = ()

    @property
    def trains_with(self) -> Side:
        """The side whose routes the update runs with."""
        return "replayed" if self.routing in ("R3", "R3+weights") else "native"

    def paired_steps(self) -> tuple[StepRecord, ...]:
        """Steps at which both sides were measured, on the same rollouts and weights."""
        return tuple(step for step in self.steps if all(side in step.mismatch for side in SIDES))

    def steps_to_compare(self, side: Side) -> tuple[StepRecord, ...]:
        """The paired steps; in a run that has none, every step at which `side` was measured."""
        return self.paired_steps() or tuple(step for step in self.steps if side in step.mismatch)


def _shape(loads_MLG: tuple[tuple[tuple[int, ...], ...], ...]) -> tuple[int, int, int] | None:
    """M, L and G, or None when they are uneven or 0."""
    layers = {len(cells) for cells in loads_MLG}
    ranks = {len(cell) for cells in loads_MLG for cell in cells}
    even = len(layers) == len(ranks) == 1 and min(layers) > 0 and min(ranks) > 0
    return (len(loads_MLG), min(layers), min(ranks)) if even else None
