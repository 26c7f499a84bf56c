"""What a step's execution is recorded as: load of every rank, planned and executed, transfers, and planning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreroute.balance import StepPlan
from foreroute.train.ranks import Ranks
from foreroute.transfer.records import TransferRecord


@dataclass(eq=False)
class StageLoad:
    """One stage on one rank.

    Attributes:
        name: of the stage.
        plan: that was executed.
        counts_MLGE: int32 [M, L, G, E], that was planned for.
        planning_s: seconds that the planner took.
        exposed_planning_s: of them, those that the stage waited for.
        executed_ML: int64 [M, L], assignments that this rank computed.
    """

    name: str
    plan: StepPlan
    counts_MLGE: NDArray[np.int32]
    planning_s: float
    exposed_planning_s: float
    executed_ML: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.executed_ML = np.zeros(self.counts_MLGE.shape[:2], np.int64)


def execution_record(loads: list[StageLoad], transfers: list[TransferRecord], ranks: Ranks) -> dict[str, Any]:
    """The record "execution" of a step, on rank 0; empty elsewhere. A collective call.

    Args:
        loads: of the stages that ran under a plan.
        transfers: of this rank.
        ranks: of the run.

    Returns:
        `ranks`, and where there were plans: for each stage `planned_MLG`, `executed_MLG` and `at_home_MLG`
        (assignments that each rank has by the plan, computed, and would have with every expert at its home) and the
        number of `replicas`; `max_over_mean` of the three, which is the sum over cells of the busiest rank's load over
        the mean's; bytes that arrived by path, seconds that the slowest rank waited for transfers, and seconds of
        planning, with those of them that nothing hid.
    """
    if not loads:
        return {} if ranks.rank else {"execution": {"ranks": ranks.size}}
    executed = [ranks.stacked(load.executed_ML).transpose(1, 2, 0) for load in loads]
    seconds_G2 = ranks.stacked(np.array([[load.planning_s, load.exposed_planning_s] for load in loads]))
    moved_G = ranks.stacked(np.array(_transferred(transfers)))
    if ranks.rank:
        return {}
    record: dict[str, Any] = {"ranks": ranks.size}
    stages = {load.name: _stage(load, executed_MLG) for load, executed_MLG in zip(loads, executed, strict=True)}
    planning_s, exposed_s = seconds_G2.sum(axis=1).max(axis=0).tolist()
    host, direct, returned, waited_G, at_home = moved_G.T
    record |= {
        "max_over_mean": {kind: _max_over_mean(stages, kind) for kind in ("planned", "executed", "at_home")},
        "replicas": sum(stage["replicas"] for stage in stages.values()),
        "bytes": {"host": int(host.sum()), "direct": int(direct.sum()), "gradients": int(returned.sum())},
        "cells_at_home": int(at_home.max()),
        "exposed_transfer_s": round(float(waited_G.max()), 4),
        "planning_s": round(planning_s, 4),
        "exposed_planning_s": round(exposed_s, 4),
        "stages": {
            name: {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in s.items()}
            for name, s in stages.items()
        },
    }
    return {"execution": record}


def _stage(load: StageLoad, executed_MLG: NDArray[np.int64]) -> dict[str, Any]:
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
        "replicas": len(load.plan.expert_R),
    }


def _max_over_mean(stages: dict[str, dict[str, Any]], kind: str) -> float:
    loads_CG = np.concatenate(
        [stage[f"{kind}_MLG"].reshape(-1, stage[f"{kind}_MLG"].shape[2]) for stage in stages.values()]
    )
    return float(loads_CG.max(axis=1).sum() / loads_CG.mean(axis=1).sum())


def _transferred(records: list[TransferRecord]) -> list[float]:
    """Bytes of weights by the host path and directly, of gradients, seconds waited, and cells served at home."""
    fetched = [record for record in records if record.kind == "fetch"]
    return [
        sum(record.host_bytes for record in fetched),
        sum(record.direct_bytes for record in fetched),
        sum(record.direct_bytes for record in records if record.kind == "return"),
        sum(record.exposed_s for record in records),
        len({record.cell for record in fetched if record.at_home_because is not None}),
    ]
