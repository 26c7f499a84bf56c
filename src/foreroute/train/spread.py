"""A policy whose experts are spread over the ranks of a run, and the plans that its stages execute.

routes known ─▶ counts of all ranks ─▶ planner's thread:  recompute │ update 0 │ update 1 │ …
                                                              ▼          ▼
main thread:                                              recompute ─▶ update 0 ─▶ …    each waits for its own plan
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute import planner
from foreroute.adapters.hf import RoutedTransformer, distribute
from foreroute.ep import BatchRows
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.plan import Links, PlanOptions, StepPlan, Topology
from foreroute.trace import RoutingTrace, count_assignments
from foreroute.train.config import ParallelConfig, TrainConfig
from foreroute.train.forward import pad
from foreroute.train.load import StageLoad, execution_record
from foreroute.train.optimizer import load_state
from foreroute.train.ranks import Ranks
from foreroute.train.schedule import Stage
from foreroute.train.whole import Whole

LINKS = Links(2e9, 1e9, 1e10, 5e-5, 1e-4)
"""Orders of magnitude of gloo and of memory in one machine. They choose paths, and change no result."""


@dataclass(frozen=True, eq=False)
class _Planned:
    """The plan of a stage, on its way.

    Attributes:
        counts_MLGE: int32 [M, L, G, E].
        number: of the weights that it runs on.
        plan: with the seconds that planning took.
    """

    counts_MLGE: NDArray[np.int32]
    number: int
    plan: Future[tuple[StepPlan, float]]


class Spread:
    """Expert-parallel execution; implements `Execution`. Made on all ranks, with the same whole policy.

    Raises:
        AttachError, TopologyError: when its experts cannot be spread over these ranks.
        TransferError: when shared memory cannot be had.
    """

    def __init__(self, policy: RoutedTransformer, config: ParallelConfig, ranks: Ranks) -> None:
        self.ranks = ranks
        per_node = config.ranks_per_node or ranks.size
        self._topology = Topology(ranks.size, per_node, config.redundant_slots, LINKS)
        self._options = PlanOptions(tolerance=config.tolerance, slots=config.slots)
        self._placed = distribute(policy.model, timeout_s=config.timeout_s)
        if config.dense == "fsdp2":
            self._placed.shard_dense()
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
        self._engine = TransferEngine(self._placed.homes, self._topology, options, peers)
        self._placed.use(self._engine)
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="foreroute-plans")
        self._published = False
        self._planned: dict[str, _Planned] = {}
        self._now: StageLoad | None = None
        self._loads: list[StageLoad] = []

    def state_dict(self) -> dict[str, Tensor]:
        return self._placed.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return self._converted(optimizer, optimizer.state_dict(), gather=True)

    def load(self, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        self._placed.load_state_dict(weights)
        load_state(optimizer, self._converted(optimizer, state, gather=False))
        self._published = False

    def plan(self, first: int, routes: RoutingTrace, stages: Sequence[Stage]) -> None:
        for stage in stages:
            counts_MLGE = self._count(routes, stage)
            homes_LE = self._placed.home_LE
            future = self._planner.submit(_plan, counts_MLGE, self._topology, self._options, homes_LE)
            self._planned[stage.name] = _Planned(counts_MLGE, first + stage.after, future)

    @contextmanager
    def running(self, stage: Stage, *, updating: bool = False) -> Iterator[None]:
        planned = self._planned.pop(stage.name, None)
        if planned is None:
            yield
            return
        begun = time.monotonic()
        plan, planning_s = planned.plan.result()
        known = time.monotonic()
        if not self._published:
            self._engine.publish()
            self._published = True
        exposed_s, publishing_s = known - begun, time.monotonic() - known
        self._placed.begin_step(planned.number, plan, planned.counts_MLGE, updating=updating)
        now = self._now = StageLoad(stage.name, plan, planned.counts_MLGE, planning_s, exposed_s, publishing_s)
        try:
            yield
        finally:
            # records of a stage that failed are not those of the next one
            self._now, now.transfers = None, self._engine.take_records()
        self._loads.append(now)

    @contextmanager
    def micro_step(self, number: int, routes: RoutingTrace) -> Iterator[None]:
        if self._now is None:
            yield
            return
        with self._placed.executing(number, BatchRows.replayed(routes, *pad(routes))) as execution:
            yield
        self._now.executed_ML[number] = execution.executed_L

    def finish_gradients(self, max_norm: float) -> float:
        self._placed.sum_gradients()
        return self._placed.clip_gradients(max_norm).item()

    def weights_changed(self) -> None:
        self._published = False

    def record(self) -> dict[str, Any]:
        assert not self._planned, f"planned and never executed: {', '.join(self._planned)}"
        loads, self._loads = self._loads, []
        return execution_record(loads, self.ranks)

    def close(self) -> None:
        """Give the shared memory back."""
        self._planner.shutdown(cancel_futures=True)
        self._engine.close()

    def _count(self, routes: RoutingTrace, stage: Stage) -> NDArray[np.int32]:
        """int32 [M, L, G, E], assignments of all ranks."""
        micro_step_S = np.repeat(np.arange(len(stage.micro_steps)), [len(part) for part in stage.micro_steps])
        mine_MLE = count_assignments(routes.select(np.concatenate(stage.micro_steps)), micro_step_S)
        return np.ascontiguousarray(np.moveaxis(self.ranks.stacked(mine_MLE.astype(np.int32)), 0, 2))

    def _converted(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, gather: bool) -> dict[str, Any]:
        """The same state with that of all parameters whole, or cut to what this rank has."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        converted: dict[int, dict[str, Any]] = {}
        for position, values in state["state"].items():
            change = partial(self._placed.whole if gather else self._placed.own, parameters[position])
            converted[position] = {
                key: change(value) if isinstance(value, Tensor) and value.dim() else value
                for key, value in values.items()
            }
        return {**state, "state": converted}


def make_execution(config: TrainConfig, policy: RoutedTransformer, ranks: Ranks) -> Whole | Spread:
    """The policy, whole in one process or its experts spread over all."""
    return Whole(policy) if ranks.size == 1 else Spread(policy, config.parallel, ranks)


def compile_planner(config: ParallelConfig) -> None:
    """Have the planner's kernels compiled, which takes a minute where no process of the machine has done it before."""
    num_ranks = config.expert
    topology = Topology(num_ranks, num_ranks, 1, LINKS)
    # everything at one expert, so that there is something to level
    counts_MLGE = np.zeros((1, 1, num_ranks, 2 * num_ranks), np.int32)
    counts_MLGE[..., 0] = 64
    _plan(counts_MLGE, topology, PlanOptions(), topology.contiguous_home_E(2 * num_ranks)[None])


def _plan(
    counts_MLGE: NDArray[np.int32], topology: Topology, options: PlanOptions, home_LE: NDArray[np.int16]
) -> tuple[StepPlan, float]:
    begun = time.monotonic()
    return planner.plan(counts_MLGE, topology, options, home_LE=home_LE), time.monotonic() - begun
