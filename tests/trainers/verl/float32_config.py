"""verl's configuration of its Megatron engine in float32, which verl refuses: in bfloat16 masks and routes hide."""

from dataclasses import dataclass

from foreroute.trainers.verl.planning import PlanningMegatronConfig


@dataclass
class Float32Config(PlanningMegatronConfig):
    def __post_init__(self):
        dtype, vars(self)["dtype"] = self.dtype, "bfloat16"
        super().__post_init__()
        vars(self)["dtype"] = dtype
