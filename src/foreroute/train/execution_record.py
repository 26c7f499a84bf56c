"""The record "execution" of a step: what was planned, what ranks executed, what moved, and what they waited for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from foreroute.ep.shared_plan import SharedPlan
from foreroute.ep.transfer.engine import TransferRecord
from foreroute.records import ExecutionRecord, Load, StageRecord, to_json
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
    def fell_back(self) -> dict[str, str]:
        """Why homes alone served a cell, by its micro-step and layer; the same on all ranks."""
        because = {(r.cell.micro_step, r.cell.layer): r.at_home_because for r in self.transfers if r.at_home_because}
        return {f"{m}.{layer}": because[m, layer] for m, layer in sorted(because)}


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
    loads_MLG = [_loads(load, executed_MLG) for load, executed_MLG in zip(loads, executed, strict=True)]
    planning_s, waited_s, transfer_s, moving_s = (round(most, 4) for most in seconds_G4.max(axis=0).tolist())
    record = ExecutionRecord(
        ranks=ranks.size,
        max_over_mean={kind: _max_over_mean([each[kind] for each in loads_MLG]) for kind in get_args(Load)},
        replicas=sum(int(load.plan.num_replicas_ML.sum()) for load in loads),
        bytes=dict(zip(("host", "direct", "gradients", "homes"), bytes_P, strict=True)),
        home_moves=moved.number,
        moving_homes_s=moving_s,
        exposed_transfer_s=transfer_s,
        planning_s=planning_s,
        exposed_planning_s=waited_s,
        stages={
            load.name: StageRecord(
                executed_MLG=each["executed"].tolist(),
                at_home_MLG=each["at_home"].tolist(),
                fell_back=load.fell_back,
                priced_options=load.priced_options,
            )
            for load, each in zip(loads, loads_MLG, strict=True)
        },
    )
    return {"execution": to_json(record)}


def _loads(load: ExecutedStage, executed_MLG: NDArray[np.int64]) -> dict[Load, NDArray[np.int64]]:
    """Give the assignments of every rank in every cell, [M, L, G]: at home, by the plan, and as executed."""
    planned_MLG, at_home_MLG = np.zeros_like(executed_MLG), np.zeros_like(executed_MLG)
    for m, layer in np.ndindex(*executed_MLG.shape[:2]):
        counts_GE = load.counts_MLGE[m, layer]
        cell = load.plan.cell(m, layer)
        planned_MLG[m, layer] = cell.loads_G(counts_GE)
        np.add.at(at_home_MLG[m, layer], cell.home_E, counts_GE.sum(axis=0))
    return {"at_home": at_home_MLG, "planned": planned_MLG, "executed": executed_MLG}


def _max_over_mean(loads: list[NDArray[np.int64]]) -> float:
    loads_CG = np.concatenate([each.reshape(-1, each.shape[2]) for each in loads])
    return float(loads_CG.max(axis=1).sum() / loads_CG.mean(axis=1).sum())
