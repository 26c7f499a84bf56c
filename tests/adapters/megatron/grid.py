"""One way of training in parallel. Imports nothing of Megatron, so that tests can be listed without it."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    ep: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    etp: int = 1
    recompute: str = "none"
    dispatcher: str = "alltoall"
    packed: bool = False
    as_shipped: bool = False
    experts: str = "sequential"
    layers: int = 4
    settings: dict = dataclasses.field(default_factory=dict)

    @property
    def ranks(self):
        """Processes. Experts share those of tensor and context parallelism, or add data-parallel ones."""
        return self.pp * max(self.tp * self.cp, self.ep * self.etp)

    @property
    def routed_layers(self):
        """Decoder layers with experts, from 0."""
        pattern = self.settings.get("moe_layer_freq", [1] * self.layers)
        return [layer for layer, has_experts in enumerate(pattern) if has_experts]

    @property
    def same_shapes(self):
        """Whether Megatron wants every micro-batch to have equally many slots.

        The all-gather dispatcher does, and so does a ring of two virtual stages, whose shapes would change places.
        """
        return self.dispatcher == "allgather" or self.vpp > 1


SAMPLE = [
    Cell(layers=2, dispatcher="allgather", packed=True),
    Cell(tp=2, ep=2, layers=2, recompute="uniform", dispatcher="allgather"),
    Cell(tp=2, ep=2, layers=2, recompute="block", packed=True),
    Cell(cp=2, tp=2, layers=2, recompute="selective", packed=True),
    Cell(pp=2, layers=2, recompute="selective", dispatcher="allgather"),
    Cell(pp=2, tp=2, ep=2, layers=2),
    Cell(pp=2, cp=2, recompute="block"),
    Cell(pp=2, cp=2, ep=2, layers=2, recompute="uniform", dispatcher="allgather", packed=True),
    Cell(pp=2, vpp=2, recompute="uniform"),
    Cell(pp=2, vpp=2, recompute="block", dispatcher="allgather", packed=True),
    Cell(pp=2, vpp=2, cp=2, dispatcher="allgather", packed=True),
    Cell(pp=2, vpp=2, tp=2, ep=2, recompute="selective"),
]
"""Every pair of values of stages, tp, cp, ep, recomputation, dispatcher and packing."""


BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
}
GROUPS = {**BIASED, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
LAST_OF_TWO = {"num_layers_in_last_pipeline_stage": 2, "moe_layer_freq": [0, 1, 1, 0, 1, 1]}
LAYOUT = {"pipeline_model_parallel_layout": "Et|ttt|t|tL"}
SHAPES = {
    "a stage of dense layers": Cell(pp=2, recompute="block", settings={"moe_layer_freq": [0, 0, 1, 1]}),
    "short last virtual stages, dense first": Cell(
        pp=2, vpp=2, layers=6, recompute="block", packed=True, settings=LAST_OF_TWO
    ),
    "stages written down": Cell(pp=2, vpp=2, layers=6, recompute="uniform", settings=LAYOUT),
    "multi-token prediction on the last stage": Cell(pp=2, recompute="uniform", settings={"mtp_num_layers": 1}),
    "experts over tensor ranks": Cell(ep=2, tp=2, etp=2, layers=2, dispatcher="allgather", recompute="uniform"),
    "a shared expert, limited to groups": Cell(
        recompute="uniform", settings={**GROUPS, "moe_shared_expert_intermediate_size": 32}
    ),
}


@dataclasses.dataclass(frozen=True)
class ExecutionCase:
    cell: Cell
    ranks: int = 2  # those beyond `cell.ranks` are data-parallel, of experts too
    optimizer: str = "momentum"  # a name of `cpu_optimizers`
    told: dict = dataclasses.field(default_factory=dict)  # to DistributedDataParallel
    complete: bool = True  # every row has a route, as an engine's last rows have not
    rounded: bool = False  # weights are those of a model in bfloat16
    replays: bool = True
    padding: str = "spread"

    def in_float64(self):
        return self.with_settings(moe_router_dtype="fp64", params_dtype=torch.float64, pipeline_dtype=torch.float64)

    def on_flex(self, backend):
        """The same, whose layers dispatch by these kernels, of which tests have stand-ins."""
        return self.with_settings({"dispatcher": "flex"}, moe_flex_dispatcher_backend=backend)

    def with_settings(self, of_cell=(), **settings):
        cell = dataclasses.replace(self.cell, settings={**self.cell.settings, **settings}, **dict(of_cell))
        return dataclasses.replace(self, cell=cell)


OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 3000}
FLEX_BACKENDS = ("deepep", "hybridep")
