"""Expert-parallel execution: the experts are spread over the ranks of a run, and each stage executes a plan.

routes known ─▶ counts of all ranks ─▶ rank 0's planner:  recompute │ update 0 │ update 1 │ …
                                                              ▼          ▼
main thread:                                              recompute ─▶ update 0 ─▶ …    each waits for its own plan
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute import planner
from foreroute.adapters.hf import RoutedTransformer, distribute
from foreroute.ep import BatchRows
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions, TransferRecord
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.errors import PlanError
from foreroute.plan import Links, PlanOptions, StepPlan, Topology
from foreroute.trace import RoutingTrace, count_assignments
from foreroute.train.config import ParallelConfig, TrainConfig
from foreroute.train.optimizer import load_state
from foreroute.train.passes import PolicyExecution, Stage, pad
from foreroute.train.ranks import Ranks

LINKS = Links(2e9, 1e9, 1e10, 5e-5, 1e-4)
"""Orders of magnitude of gloo and of memory in one machine. They choose the paths of replicas,
and change no result."""


class _Planned(NamedTuple):
    """The plan of a stage, which may still be in the making, for weights with `number` optimizer steps behind them."""

    counts_MLGE: NDArray[np.integer]
    number: int
    plan: Future[tuple[StepPlan, float]] | None  # None but on the rank that plans


class ExpertParallel(PolicyExecution):
    """The execution with experts spread over the ranks. Made on all ranks, with the same whole policy.

    Raises:
        AttachError, TopologyError: when its experts cannot be spread over these ranks.
        TransferError: when shared memory cannot be had.
    """

    def __init__(self, policy: RoutedTransformer, config: ParallelConfig, ranks: Ranks) -> None:
        super().__init__(policy)
        self.ranks = ranks
        per_node = config.ranks_per_node or ranks.size
        self._topology = Topology(ranks.size, per_node, config.redundant_slots, LINKS)
        self._options = PlanOptions(tolerance=config.tolerance, slots=config.slots)
        self._model = distribute(policy.model, timeout_s=config.timeout_s)
        if config.dense == "fsdp2":
            self._model.shard_dense()
        options = TransferOptions(
            paths=config.paths,
            slots=config.slots,
            prefetch=config.prefetch,
            deadline_s=config.deadline_s,
            checksums=config.checksums,
            timeout_s=config.timeout_s,
            directory=Path(config.shared_memory),
        )
        peers = PeerGroup(timeout_s=config.timeout_s)
        self._engine = TransferEngine(self._model.homes, self._topology, options, peers)
        self._model.use(self._engine)
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="foreroute-plans")
        self._published = False
        self._planned: dict[str, _Planned] = {}
        self._now: ExecutedStage | None = None
        self._executed: list[ExecutedStage] = []

    def state_dict(self) -> dict[str, Tensor]:
        return self._model.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return self._converted(optimizer, optimizer.state_dict(), gather=True)

    def load(self, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        self._model.load_state_dict(weights)
        load_state(optimizer, self._converted(optimizer, state, gather=False))
        self._published = False

    def plan(self, first: int, routes: RoutingTrace, stages: Sequence[Stage]) -> None:
        for stage in stages:
            counts_MLGE = self._count(routes, stage)
            future = None
            if self.ranks.rank == 0:
                home_LE = self._model.home_LE
                future = self._planner.submit(_plan, counts_MLGE, self._topology, self._options, home_LE)
            self._planned[stage.name] = _Planned(counts_MLGE, first + stage.after, future)

    @contextmanager
    def running(self, stage: Stage, *, updating: bool = False) -> Iterator[None]:
        planned = self._planned.pop(stage.name, None)
        if planned is None:
            yield
            return
        begun = time.monotonic()
        plan, planning_s = self._shared(planned)
        known = time.monotonic()
        # replicas are fetched from what is published, which is the same for all stages on the same weights
        if not self._published:
            self._engine.publish()
            self._published = True
        exposed_s, publishing_s = known - begun, time.monotonic() - known
        self._model.begin_step(planned.number, plan, planned.counts_MLGE, updating=updating)
        now = self._now = ExecutedStage(stage.name, plan, planned.counts_MLGE, planning_s, exposed_s, publishing_s)
        try:
            yield
        finally:
            # records of a stage that failed are not those of the next one
            self._now, now.transfers = None, self._engine.take_records()
        self._executed.append(now)

    @contextmanager
    def micro_step(self, number: int, routes: RoutingTrace) -> Iterator[None]:
        if self._now is None:
            yield
            return
        with self._model.executing(number, BatchRows.replayed(routes, *pad(routes))) as execution:
            yield
        self._now.executed_ML[number] = execution.executed_L

    def finish_gradients(self, max_norm: float) -> float:
        self._model.sum_gradients()
        return self._model.clip_gradients(max_norm).item()

    def weights_changed(self) -> None:
        self._published = False

    def record(self) -> dict[str, Any]:
        assert not self._planned, f"planned and never executed: {', '.join(self._planned)}"
        executed, self._executed = self._executed, []
        return execution_record(executed, self.ranks)

    def close(self) -> None:
        """Give the shared memory back."""
        self._planner.shutdown(cancel_futures=True)
        self._engine.close()

    def _shared(self, planned: _Planned) -> tuple[StepPlan, float]:
        """The plan of a stage, from rank 0, and the seconds that this rank planned."""
        made, planning_s = None, 0.0
        try:
            if planned.plan is not None:
                made, planning_s = planned.plan.result()
        except Exception:
            with suppress(PlanError):  # of no plan, which is what the others are told
                self._model.share_plan(None)
            raise
        return self._model.share_plan(made), planning_s

    def _count(self, routes: RoutingTrace, stage: Stage) -> NDArray[np.int64]:
        """Count the assignments of all ranks, int64 [M, L, G, E]."""
        of_stage = stage.micro_steps
        micro_step_S = np.repeat(np.arange(len(of_stage)), np.diff(of_stage.offsets))
        return self._model.gather_counts(count_assignments(routes.select(of_stage.order_S), micro_step_S))

    def _converted(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, gather: bool) -> dict[str, Any]:
        """Gather the state of every parameter, or cut it to the part that this rank has."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        converted: dict[int, dict[str, Any]] = {}
        for position, values in state["state"].items():
            change = partial(self._model.whole if gather else self._model.own, parameters[position])
            converted[position] = {
                key: change(value) if isinstance(value, Tensor) and value.dim() else value
                for key, value in values.items()
            }
        return {**state, "state": converted}


def make_execution(config: TrainConfig, policy: RoutedTransformer, ranks: Ranks) -> PolicyExecution:
    """Execute the policy in one process, or with its experts spread over all ranks."""
    return PolicyExecution(policy) if ranks.size == 1 else ExpertParallel(policy, config.parallel, ranks)


def compile_planner(config: ParallelConfig) -> None:
    """Compile the planner's kernels, which takes a minute where no process of the machine has done it before."""
    num_ranks = config.expert
    topology = Topology(num_ranks, num_ranks, 1, LINKS)
    # all assignments go to one expert, so that replicas are placed and every kernel is reached
    counts_MLGE = np.zeros((1, 1, num_ranks, 2 * num_ranks), np.int32)
    counts_MLGE[..., 0] = 64
    _plan(counts_MLGE, topology, PlanOptions(), topology.contiguous_home_E(2 * num_ranks)[None])


def _plan(
    counts_MLGE: NDArray[np.integer], topology: Topology, options: PlanOptions, home_LE: NDArray[np.int16]
) -> tuple[StepPlan, float]:
    begun = time.monotonic()
    return planner.plan(counts_MLGE, topology, options, home_LE=home_LE), time.monotonic() - begun


@dataclass(eq=False)
class ExecutedStage:
    """What one stage did on one rank under its plan for `counts_MLGE`.

    Attributes:
        planning_s: seconds that the planner took.
        exposed_planning_s: seconds that the stage waited for its plan.
        publishing_s: seconds that it waited for weights to be published.
        transfers: of this rank, once the stage has ended.
        executed_ML: int64 [M, L], assignments that this rank computed.
    """

    name: str
    plan: StepPlan
    counts_MLGE: NDArray[np.integer]
    planning_s: float
    exposed_planning_s: float
    publishing_s: float
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


def execution_record(loads: list[ExecutedStage], ranks: Ranks) -> dict[str, Any]:
    """Make the record "execution" of a step on rank 0; it is empty elsewhere. A collective call.

    It is what `docs/metrics.md` lists under `execution`; `ranks` alone where nothing was planned.
    """
    if not loads:
        return {} if ranks.rank else {"execution": {"ranks": ranks.size}}
    executed = [ranks.all_gather(load.executed_ML).transpose(1, 2, 0) for load in loads]
    bytes_P = ranks.sum(np.sum([load.bytes_P for load in loads], axis=0)).astype(np.int64).tolist()
    mine = [[load.planning_s, load.exposed_planning_s, load.exposed_transfer_s] for load in loads]
    seconds_G3 = ranks.all_gather(np.sum(mine, axis=0))
    if ranks.rank:
        return {}
    stages = {load.name: _stage(load, executed_MLG) for load, executed_MLG in zip(loads, executed, strict=True)}
    record = {
        "ranks": ranks.size,
        "max_over_mean": {kind: _max_over_mean(stages, kind) for kind in ("planned", "executed", "at_home")},
        "replicas": sum(stage["replicas"] for stage in stages.values()),
        "bytes": dict(zip(("host", "direct", "gradients"), bytes_P, strict=True)),
        "cells_at_home": sum(len(stage["fell_back"]) for stage in stages.values()),
        **_seconds(seconds_G3),
        "stages": {
            name: {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in s.items()}
            for name, s in stages.items()
        },
    }
    return {"execution": record}


def _seconds(seconds_G3: NDArray[np.float64]) -> dict[str, float]:
    """Give the seconds that one rank planned, and the most that a rank waited for plans and for transfers."""
    planning_s, waited_s, transfer_s = seconds_G3.max(axis=0).tolist()
    return {
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
        "replicas": len(load.plan.expert_R),
        "fell_back": load.fell_back,
    }


def _max_over_mean(stages: dict[str, dict[str, Any]], kind: str) -> float:
    loads_CG = np.concatenate(
        [stage[f"{kind}_MLG"].reshape(-1, stage[f"{kind}_MLG"].shape[2]) for stage in stages.values()]
    )
    return float(loads_CG.max(axis=1).sum() / loads_CG.mean(axis=1).sum())
