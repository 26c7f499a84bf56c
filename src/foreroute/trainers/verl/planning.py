"""Switch for plans in verl's Megatron engine.

When the micro-batches of a batch are known and none of them has run, the ranks that share experts tell each other their
counts. Then a thread of the first plans, while the first micro-batch runs at home. The others run under the plan, which
all are given. A batch of one micro-batch waits for its plan, and so does a pipeline, whose stages are in other
micro-batches at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from verl.workers.config import McoreEngineConfig

from foreroute.costs import CostModel, hardware_preset
from foreroute.costs.cluster_file import load_cluster
from foreroute.errors import ConfigError
from foreroute.plan import Topology
from foreroute.plan.options import PackingRule, PlanOptions
from foreroute.trainers.plans import plan_options
from foreroute.trainers.verl.registry import refuse_what_engines_pass_over


@dataclass
class PlanningMegatronConfig(McoreEngineConfig):
    """verl's configuration of its Megatron engine, with plans.

    One line of verl's configuration asks for it:

        actor_rollout_ref.actor.megatron._target_=foreroute.trainers.verl.planning.PlanningMegatronConfig

    Its own keys are set with a `+`, such as `+actor_rollout_ref.actor.megatron.plan.tolerance=0`.

    Attributes:
        asks_for_plans: what engines without plans are refused by.
        redundant_slots: R, replicas that a rank may host in a layer.
        hardware: a name of `foreroute.costs.hardware_preset`; its nodes and links are planned for.
        topology: instead of both, a topology file, by whose rates recompute and update are executed by the plan or at
            homes.
        plan: a table of the planner's options, as `PlanOptions` has them. Homes stay. `packing` "length" leaves
            micro-batches as verl makes them; with "routes" their sequences change places before each plan, so that
            fewer weights are fetched, and the first micro-batch waits for that.

    Raises:
        ConfigError: when a rank is to host no replica, no such hardware is known, the file cannot be read, an option is
            unknown or cannot be carried out, or there is no packing by routes for these sizes of groups.
    """

    asks_for_plans: ClassVar[bool] = True
    redundant_slots: int = 2
    hardware: str = "h100"
    topology: str | None = None
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def packing(self) -> PackingRule:
        """Rule by which sequences are packed."""
        return PlanOptions.from_table(self.plan).packing

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.redundant_slots < 1:
            raise ConfigError(
                f"redundant_slots is {self.redundant_slots}; expected 1 or more: homes stay, so plans are made of "
                "replicas. To train without plans, leave out the line that names PlanningMegatronConfig"
            )
        of_data = self.tensor_model_parallel_size * self.context_parallel_size
        expert_tensor = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        of_experts = self.expert_model_parallel_size * expert_tensor
        # else a rank's sequences would be in the micro-steps of several groups of experts
        is_whole = expert_tensor <= of_data and max(of_data, of_experts) % min(of_data, of_experts) == 0
        if self.packing == "routes" and not is_whole:
            raise ConfigError(
                f"packing is routes, and {of_data} ranks have the same sequences (tensor times context parallel), "
                f"{of_experts} the experts of a layer (expert times expert tensor parallel); expected one to be a "
                "multiple of the other. Take the packing length"
            )
        self.planned_for(1)  # raises here, on the driver too, for what nobody can plan for or carry out

    def planned_for(self, num_ranks: int) -> tuple[Topology, CostModel | None, PlanOptions]:
        """Return what plans of this many ranks are made for, their prices, if there are any, and their options."""
        if self.topology is None:
            topology, costs = hardware_preset(self.hardware).topology(num_ranks, self.redundant_slots), None
        else:
            cluster = load_cluster(Path(self.topology))
            topology, costs = cluster.topology, replace(cluster.costs, paths="direct")
        return topology, costs, plan_options(self.plan, costs, packs=True)


# a worker builds this configuration before its engine; the driver builds it too, and makes no engine
refuse_what_engines_pass_over()
