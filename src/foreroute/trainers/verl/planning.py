"""Plans in verl's Megatron engine: what switches them on, and one batch that is counted, planned and executed.

When the micro-batches of a batch are known and none of them has run, the ranks that share experts tell each other their
counts. Then a thread of the first plans, while the first micro-batch runs at home. The others run under the plan, which
all are given. A batch of one micro-batch waits for its plan, and so does a pipeline, whose stages are in other
micro-batches at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from verl.workers.config import McoreEngineConfig

from foreroute.costs import CostModel, hardware_preset
from foreroute.costs.cluster_file import load_cluster
from foreroute.errors import ConfigError
from foreroute.plan import PlanOptions, Topology
from foreroute.plan.options import PassName
from foreroute.planner import plan
from foreroute.trainers.plan_sums import PlanSums
from foreroute.trainers.verl.registry import refuse_what_engines_pass_over

if TYPE_CHECKING:
    from foreroute.adapters.megatron import RoutedMegatron
    from foreroute.adapters.megatron.route_shard import RouteShard
    from foreroute.ep import PlanExecution
    from foreroute.plan import StepPlan

AT_HOME = PlanOptions(replicas=False)
UNDER_PLAN = PlanOptions()
"""Homes stay: verl's checkpoints, and its weights for the rollout, look for experts where Megatron put them first."""


@dataclass
class PlanningMegatronConfig(McoreEngineConfig):
    """verl's configuration of its Megatron engine, with plans.

    One line of verl's configuration asks for it:

        actor_rollout_ref.actor.megatron._target_=foreroute.trainers.verl.planning.PlanningMegatronConfig

    Its own keys are set with a `+`, such as `+actor_rollout_ref.actor.megatron.redundant_slots=4`.

    Attributes:
        asks_for_plans: what engines without plans are refused by.
        redundant_slots: R, replicas that a rank may serve in a layer.
        hardware: a name of `foreroute.costs.hardware_preset`; its nodes and links are planned for.
        topology: instead of both, a topology file, by whose rates recompute and update are executed by the plan or at
            homes.

    Raises:
        ConfigError: when a rank is to serve no replica, no such hardware is known, or the file cannot be read.
    """

    asks_for_plans: ClassVar[bool] = True
    redundant_slots: int = 2
    hardware: str = "h100"
    topology: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.redundant_slots < 1:
            raise ConfigError(
                f"redundant_slots is {self.redundant_slots}; expected 1 or more: homes stay, so plans are made of "
                "replicas. To train without plans, leave out the line that names PlanningMegatronConfig"
            )
        self.planned_for(1)

    def planned_for(self, num_ranks: int) -> tuple[Topology, CostModel | None]:
        """What plans of this many ranks are made for, and their prices, if there are any."""
        if self.topology is None:
            return hardware_preset(self.hardware).topology(num_ranks, self.redundant_slots), None
        cluster = load_cluster(Path(self.topology))
        return cluster.topology, replace(cluster.costs, paths="direct")


# a worker builds this configuration before its engine; the driver builds it too, and makes no engine
refuse_what_engines_pass_over()


class PlannedBatch:
    """A batch of verl under a plan. Making one is a collective call of the ranks that share experts."""

    def __init__(
        self,
        routed: RoutedMegatron,
        shards: Sequence[RouteShard],
        config: PlanningMegatronConfig,
        open_executions: ExitStack,  # holds the active execution until all micro-batches have run
        *,
        is_first: bool,  # of the ranks that share experts, so that it plans for all
        at_once: bool,  # the first micro-batch waits for the plan too
    ) -> None:
        self._routed, self._shards, self._open = routed, list(shards), open_executions
        self._counts_MLGE = routed.gather_counts(self._shards)
        self._topology, costs = config.planned_for(self._counts_MLGE.shape[2])
        self._num_at_home = 0 if at_once else min(1, len(self._shards) - 1)
        self._executions: list[PlanExecution] = []
        if is_first:
            with_plan_MLGE, thread = self._counts_MLGE[self._num_at_home :], ThreadPoolExecutor(1, "foreroute-plan")
            how: dict[str, Any] = {"home_LE": routed.home_LE, "costs": costs}
            self._planned = thread.submit(plan, with_plan_MLGE, self._topology, UNDER_PLAN, **how)
            thread.shutdown(wait=False)

    def begin(self, number: int) -> None:
        """Activate the plan of a micro-batch that is about to run. A collective call before the first two."""
        if number == self._num_at_home:
            self._open.close()
            self._execute(lambda: self._planned.result(), slice(self._num_at_home, None))
        elif number == 0:
            counts_MLGE, home_LE = self._counts_MLGE[:1], self._routed.home_LE
            self._execute(lambda: plan(counts_MLGE, self._topology, AT_HOME, home_LE=home_LE), slice(0, 1))

    def _execute(self, make: Callable[[], StepPlan], part: slice) -> None:
        made = self._routed.share_plan(make)
        execution = self._routed.execute(made, self._counts_MLGE[part], self._shards[part])
        self._executions.append(self._open.enter_context(execution))

    def add_to(self, sums: PlanSums, name: PassName, group: Any, stages: Any) -> None:
        """Add what all ranks executed, after the last micro-batch. A collective call of the group and its stages."""
        mine_ML = torch.from_numpy(np.concatenate([execution.executed_ML for execution in self._executions]))
        dist.all_reduce(mine_ML, group=stages)  # each has its own layers
        executed = [torch.empty_like(mine_ML) for _ in range(self._counts_MLGE.shape[2])]
        dist.all_gather(executed, mine_ML, group=group)
        served = [execution.hosted[name].plan for execution in self._executions]
        executed_MLG = torch.stack(executed, -1).numpy()
        sums.add(served, self._counts_MLGE, self._routed.home_LE, executed_MLG, first=self._num_at_home)
