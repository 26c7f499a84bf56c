"""The record "execution" of a step: what was planned, what ranks executed, what moved, and what they waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.ep.shared_plan import SharedPlan
from foreroute.ep.transfer.engine import TransferRecord
from foreroute.train.ranks import Ranks


@dataclass(eq=False)
class ExecutedStage:
    """What one stage did on one rank under its plan for `counts_MLGE`.

    Attributes:
        publishing_s: seconds that it waited for weights to be published.
        planning_s: seconds that the planner took, on the rank that plans.
        exposed_planning_s: seconds of them that the stage waited for, before it began and before later micro-steps.
        priced_options: whether pay-off and traffic were on, and why, on the rank that plans.
        transfers: of this rank, once the stage has ended.
        executed_ML: int64 [M, L], assignments that this rank computed.
    """

    name: str
    plan: SharedPlan
    counts_MLGE: NDArray[np.integer]
    publishing_s: float
    planning_s: float = 0.0
    exposed_planning_s: float = 0.0
    priced_options: dict[str, str] = field(default_factory=dict)
    transfers: list[TransferRecord] = field(default_factory=list)
    executed_ML: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.executed_ML = np.zeros(self.counts_MLGE.shape[:2], np.int64)

    @property
    def bytes_P(self) -> list[int]:
        """The bytes that arrived at this rank: weights by host memory, weights directly, and gradients."""
        fetched = [record for record in self.transfers if record.kind == "fetch"]
        returned = [record for record in self.transfers if record.kind == "return"]
        return [
            sum(record.host_bytes for record in fetched),
            sum(record.direct_bytes for record in fetched),
            sum(record.direct_bytes for record in returned),
        ]

    @property
    def exposed_transfer_s(self) -> float:
        """The seconds that this rank waited for weights and gradients."""
        return self.publishing_s + sum(record.exposed_s for record in self.transfers)

    @property
    def fell_back(self) -> list[dict[str, Any]]:
        """The cells that their homes served alone, and why; the same on all ranks."""
        because = {(r.cell.micro_step, r.cell.layer): r.at_home_because for r in self.transfers if r.at_home_because}
        return [{"micro_step": m, "layer": layer, "because": because[m, layer]} for m, layer in sorted(because)]


@dataclass(frozen=True)
class MovedHomes:
    """Experts that changed their home before the stages of a step.

    Attributes:
        number: experts, of all layers.
        received_bytes: of weights and optimizer state, on this rank.
        seconds: of placing and moving them, which nothing hides.
    """

    number: int = 0
    received_bytes: int = 0
    seconds: float = 0.0


def execution_record(loads: list[ExecutedStage], moved: MovedHomes, ranks: Ranks) -> dict[str, Any]:
    """Make the record "execution" of a step on rank 0; it is empty elsewhere. A collective call.

    It is what `docs/metrics.md` lists under `execution`; `ranks` alone where nothing was planned.
    """
    if not loads:
        return {} if ranks.rank else {"execution": {"ranks": ranks.size}}
    executed = [ranks.all_gather(load.executed_ML).transpose(1, 2, 0) for load in loads]
    mine = np.sum([load.bytes_P for load in loads], axis=0)
    bytes_P = ranks.sum([*mine, moved.received_bytes]).astype(np.int64).tolist()
    waits = [[load.planning_s, load.exposed_planning_s, load.exposed_transfer_s] for load in loads]
    seconds_G4 = ranks.all_gather(np.append(np.sum(waits, axis=0), moved.seconds))
    if ranks.rank:
        return {}
    stages = {load.name: _stage(load, executed_MLG) for load, executed_MLG in zip(loads, executed, strict=True)}
    record = {
        "ranks": ranks.size,
        "max_over_mean": {kind: _max_over_mean(stages, kind) for kind in ("planned", "executed", "at_home")},
        "replicas": sum(stage["replicas"] for stage in stages.values()),
        "bytes": dict(zip(("host", "direct", "gradients", "homes"), bytes_P, strict=True)),
        "home_moves": moved.number,
        "cells_at_home": sum(len(stage["fell_back"]) for stage in stages.values()),
        **_seconds(seconds_G4),
        "stages": {
            name: {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in s.items()}
            for name, s in stages.items()
        },
    }
    return {"execution": record}


def _seconds(seconds_G4: NDArray[np.float64]) -> dict[str, float]:
    """Give the seconds of planning, and the most that a rank waited for plans, for transfers and for moves of homes."""
    planning_s, waited_s, transfer_s, moving_s = seconds_G4.max(axis=0).tolist()
    return {
        "moving_homes_s": round(moving_s, 4),
        "exposed_transfer_s": round(transfer_s, 4),
        "planning_s": round(planning_s, 4),
        "exposed_planning_s": round(waited_s, 4),
        "hidden_planning_share": round(1 - min(1.0, waited_s / planning_s), 4),
    }


def _stage(load: ExecutedStage, executed_MLG: NDArray[np.int64]) -> dict[str, Any]:
    planned_MLG, at_home_MLG = np.zeros_like(executed_MLG), np.zeros_like(executed_MLG)
    for m, layer in np.ndindex(*executed_MLG.shape[:2]):
        counts_GE = load.counts_MLGE[m, layer]
        cell = load.plan.cell(m, layer)
        planned_MLG[m, layer] = cell.loads_G(counts_GE)
        np.add.at(at_home_MLG[m, layer], cell.home_E, counts_GE.sum(axis=0))
    return {
        "planned_MLG": planned_MLG,
        "executed_MLG": executed_MLG,
        "at_home_MLG": at_home_MLG,
        "replicas": int(load.plan.num_replicas_ML.sum()),
        "fell_back": load.fell_back,
        "priced_options": load.priced_options,
    }


def _max_over_mean(stages: dict[str, dict[str, Any]], kind: str) -> float:
    loads_CG = np.concatenate(
        [stage[f"{kind}_MLG"].reshape(-1, stage[f"{kind}_MLG"].shape[2]) for stage in stages.values()]
    )
    return float(loads_CG.max(axis=1).sum() / loads_CG.mean(axis=1).sum())
