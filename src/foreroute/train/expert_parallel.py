"""Expert-parallel execution: the experts are spread over the ranks of a run, and each stage executes a plan.

routes known ─▶ counts of all ranks ─▶ rank 0's planner:  recompute │ update 0 │ update 1 │ …
                                                           ▼ ▼  ▼       ▼ ▼
main thread:                                               recompute ─▶ update 0 ─▶ …    micro-steps as they are planned
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreroute.adapters.hf import RoutedTransformer, distribute
from foreroute.ep import BatchRows
from foreroute.ep.shared_plan import SharedPlan
from foreroute.ep.transfer.engine import TransferEngine, TransferOptions
from foreroute.ep.transfer.peers import PeerGroup
from foreroute.errors import PlanError
from foreroute.trace import RoutingTrace, count_assignments
from foreroute.train.config import ParallelConfig, TrainConfig
from foreroute.train.execution_record import ExecutedStage, MovedHomes, execution_record
from foreroute.train.optimizer import load_state
from foreroute.train.passes import PolicyExecution, Stage, pad
from foreroute.train.ranks import Ranks
from foreroute.train.stage_planner import PlannedStage, StagePlanner, read_planning


class _Announced(NamedTuple):
    """A stage that will run on weights with `number` optimizer steps behind them; its plan, on the rank that plans."""

    counts_MLGE: NDArray[np.integer]
    number: int
    planned: PlannedStage | None


class ExpertParallel(PolicyExecution):
    """The execution with experts spread over the ranks. Made on all ranks, with the same whole policy.

    Raises:
        AttachError, TopologyError: when its experts cannot be spread over these ranks.
        ConfigError: when the topology file cannot be read, or is not the same on all ranks.
        TransferError: when shared memory cannot be had.
    """

    def __init__(self, policy: RoutedTransformer, config: ParallelConfig, ranks: Ranks) -> None:
        super().__init__(policy)
        self.ranks = ranks
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
        planning = read_planning(config, policy.spec)
        ranks.require_same({"the topology": str(planning)}, "Give all of them the same topology file")
        self._planner = StagePlanner(planning)
        self._engine = TransferEngine(self._model.homes, planning.topology, options, peers)
        self._model.use(self._engine)
        self._published = False
        self._announced: dict[str, _Announced] = {}
        self._moved = MovedHomes()
        self._now: ExecutedStage | None = None
        self._executed: list[ExecutedStage] = []

    def state_dict(self) -> dict[str, Tensor]:
        return self._model.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return self._converted(optimizer, optimizer.state_dict(), gather=True)

    def home_LE(self) -> NDArray[np.int16] | None:
        return None if self._planner.planning.options.home_moves == 0 else self._model.home_LE

    def move_homes(self, home_LE: NDArray[np.int16], optimizer: torch.optim.Optimizer) -> None:
        num_experts, size = home_LE.shape[1], self.ranks.size
        # those of a run on other ranks are of no use
        if (np.sort(home_LE, axis=1) == np.repeat(np.arange(size), num_experts // size)).all():
            self._model.move_homes(home_LE, optimizer)
            self._published = False

    def load(self, weights: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        self._model.load_state_dict(weights)
        load_state(optimizer, self._converted(optimizer, state, gather=False))
        self._published = False

    def plan(self, first: int, routes: RoutingTrace, stages: Sequence[Stage], optimizer: torch.optim.Optimizer) -> None:
        counts = [self._count(routes, stage) for stage in stages]
        if counts and self._planner.planning.options.home_moves != 0:
            self._place_experts(np.concatenate(counts), optimizer)
        for stage, counts_MLGE in zip(stages, counts, strict=True):
            planned = None
            if self.ranks.rank == 0:
                planned = self._planner.submit(counts_MLGE, self._model.home_LE)
            self._announced[stage.name] = _Announced(counts_MLGE, first + stage.after, planned)

    @contextmanager
    def running(self, stage: Stage, *, updating: bool = False) -> Iterator[None]:
        announced = self._announced.pop(stage.name, None)
        if announced is None:
            yield
            return
        plan, waited_s = self._shared(announced.planned)
        known = time.monotonic()
        # replicas are fetched from what is published, which is the same for all stages on the same weights
        if not self._published:
            self._engine.publish()
            self._published = True
        publishing_s = time.monotonic() - known
        self._model.begin_step(announced.number, plan, announced.counts_MLGE, updating=updating)
        now = self._now = ExecutedStage(stage.name, plan, announced.counts_MLGE, publishing_s)
        try:
            yield
        finally:
            # records of a stage that failed are not those of the next one
            self._now, now.transfers = None, self._engine.take_records()
        if announced.planned is not None:
            now.planning_s, now.exposed_planning_s = announced.planned.seconds.result(), waited_s + plan.waited_s
            now.priced_options = announced.planned.progress.result().priced_options
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
        assert not self._announced, f"planned and never executed: {', '.join(self._announced)}"
        executed, self._executed = self._executed, []
        moved, self._moved = self._moved, MovedHomes()
        return execution_record(executed, moved, self.ranks)

    def close(self) -> None:
        """Give the shared memory back."""
        self._planner.close()
        self._engine.close()

    def _place_experts(self, counts_MLGE: NDArray[np.integer], optimizer: torch.optim.Optimizer) -> None:
        """Move experts to where rank 0 wants them for these micro-steps."""
        begun, before_LE = time.monotonic(), self._model.home_LE
        after_LE = torch.from_numpy(before_LE.astype(np.int64))

        def place() -> None:
            after_LE.copy_(torch.from_numpy(self._planner.homes(counts_MLGE, before_LE)))

        self.ranks.on_rank_0("placing experts", place)
        self.ranks.broadcast({"homes": after_LE})
        home_LE = after_LE.numpy().astype(np.int16)
        received = self._model.move_homes(home_LE, optimizer)
        self._published = False
        self._moved = MovedHomes(int((home_LE != before_LE).sum()), received, time.monotonic() - begun)

    def _shared(self, planned: PlannedStage | None) -> tuple[SharedPlan, float]:
        """The plan of a stage, its first micro-steps known, and the seconds that this rank waited for it to begin."""
        begun, progress = time.monotonic(), None
        try:
            if planned is not None:
                progress = planned.progress.result()
        except Exception:
            with suppress(PlanError):  # of no plan, which is what the others are told
                self._model.share_plan(None)
            raise
        waited_s = time.monotonic() - begun
        return self._model.share_plan(progress), waited_s

    def _count(self, routes: RoutingTrace, stage: Stage) -> NDArray[np.int64]:
        """Count the assignments of all ranks, int64 [M, L, G, E]."""
        micro_step_S = np.repeat(np.arange(len(stage.micro_steps)), [len(each) for each in stage.micro_steps])
        return self._model.gather_counts(count_assignments(routes.select(stage.order_S), micro_step_S))

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
