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
    settings: tuple = ()

    @property
    def ranks(self):
        """Processes. Experts share those of tensor and context parallelism, or add data-parallel ones."""
        return self.pp * max(self.tp * self.cp, self.ep * self.etp)

    @property
    def routed_layers(self):
        """Decoder layers with experts, from 0."""
        pattern = dict(self.settings).get("moe_layer_freq", [1] * self.layers)
        return [layer for layer, has_experts in enumerate(pattern) if has_experts]

    @property
    def stages(self):
        return self.pp, self.vpp

    @property
    def same_shapes(self):
        """Whether Megatron wants every micro-batch to have equally many slots.

        The all-gather dispatcher does, and so does a ring of two virtual stages, whose shapes would change places.
        """
        return self.dispatcher == "allgather" or self.vpp > 1

    @property
    def split(self):
        """How the model is split, in words."""
        sizes = [f"{n}{getattr(self, n)}" for n in ("ep", "tp", "etp", "pp", "vpp", "cp") if getattr(self, n) > 1]
        return "-".join(sizes) or "whole"

    def __str__(self):
        return " ".join([self.split, self.recompute, self.dispatcher, "packed" if self.packed else "padded"])


MOST_RANKS = 4
"""What two cores carry."""

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


def with_settings(cell_settings, **cell):
    return Cell(settings=tuple(cell_settings.items()), **cell)


BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
}

SHAPES = {
    "a stage of dense layers": with_settings({"moe_layer_freq": [0, 0, 1, 1]}, pp=2, recompute="block"),
    "short last virtual stages, dense first": with_settings(
        {"num_layers_in_last_pipeline_stage": 2, "moe_layer_freq": [0, 1, 1, 0, 1, 1]},
        pp=2,
        vpp=2,
        layers=6,
        recompute="block",
        packed=True,
    ),
    "stages written down": with_settings(
        {"pipeline_model_parallel_layout": "Et|ttt|t|tL"}, pp=2, vpp=2, layers=6, recompute="uniform"
    ),
    "multi-token prediction on the last stage": with_settings({"mtp_num_layers": 1}, pp=2, recompute="uniform"),
    "experts over tensor ranks": with_settings(
        {}, ep=2, tp=2, etp=2, layers=2, dispatcher="allgather", recompute="uniform"
    ),
    "a shared expert, limited to groups": with_settings(
        {**BIASED, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_shared_expert_intermediate_size": 32},
        recompute="uniform",
    ),
}


FLOAT64 = {"moe_router_dtype": "fp64", "params_dtype": torch.float64, "pipeline_dtype": torch.float64}


@dataclasses.dataclass(frozen=True)
class ExecutionCase:
    """A way of training under executed plans."""

    cell: Cell
    ranks: int = 2  # those beyond `cell.ranks` are data-parallel, of experts too
    optimizer: str = "momentum"  # a name of `cpu_optimizers`
    told: tuple = ()  # to DistributedDataParallel
    complete: bool = True  # every row has a route, as an engine's last rows have not
    rounded: bool = False  # weights are those of a model in bfloat16
    replays: bool = True
    padding: str = "spread"

    def __str__(self):
        said = " ".join(f"{name}={value}" for name, value in self.told)
        return f"{self.cell}, {self.ranks} ranks, {self.optimizer} {said}"

    def in_float64(self):
        settings = (*self.cell.settings, *FLOAT64.items())
        return dataclasses.replace(self, cell=dataclasses.replace(self.cell, settings=settings))


OVERLAP = (("overlap_grad_reduce", True), ("bucket_size", 3000))
PLANS = ("static", "planned", "random")
"""Every expert at its home; the planner's; valid ones of no merit, which also move homes."""


def under(kind, ranks=2, more=(), layers=2, **cell):
    """(case, kinds of plans) of ranks that share experts in two."""
    return ExecutionCase(Cell(ep=2, layers=layers, **cell), ranks, **dict(more)), (kind,)


GATHERED, PARTLY, OVERLAPPING = {"dispatcher": "allgather"}, {"complete": False}, {"told": OVERLAP}
DISTRIBUTED = {"optimizer": "distributed", **OVERLAPPING}
EXECUTED = {
    "ep2": [under("planned", packed=True), under("static", recompute="uniform", **GATHERED)],
    "ep2-tp2": [under("static", tp=2), under("random", tp=2, recompute="uniform", packed=True, **GATHERED)],
    "ep2-cp2": [
        under("planned", more=PARTLY, cp=2, recompute="block", packed=True),
        under("planned", more=PARTLY, cp=2, recompute="selective", **GATHERED),
    ],
    "ep2-pp2-vpp2": [
        under("planned", 4, layers=4, pp=2, vpp=2, recompute="uniform"),
        under("random", 4, layers=4, pp=2, vpp=2, packed=True, **GATHERED),
    ],
    "ep2-edp2": [
        under("random", 4, OVERLAPPING, recompute="block"),
        under("random", 4, DISTRIBUTED, recompute="selective", packed=True),
        under("static", 4, DISTRIBUTED, recompute="block", **GATHERED),
        under("planned", 4, {"optimizer": "distributed", "told": (*OVERLAP, ("overlap_param_gather", True))}),
    ],
}
"""By split, what runs in the same processes."""


THREE_PICKS = {"moe_router_topk": 3, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
EXECUTED_SHAPES = [
    {**THREE_PICKS, "moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True},
    {**BIASED, "moe_router_num_groups": 4, "moe_router_group_topk": 2, "mtp_num_layers": 1},
]
"""Settings of layers under which plans are executed, in packed micro-batches: auxiliary losses count padding else."""


GROUPED = {
    "grouped": ExecutionCase(Cell(ep=2, layers=2, experts="grouped")),
    "grouped, fused": ExecutionCase(
        Cell(ep=2, layers=2, experts="grouped, fused", recompute="selective", dispatcher="allgather", packed=True)
    ),
    "grouped, fused, distributed": ExecutionCase(
        Cell(ep=2, layers=2, experts="grouped, fused", recompute="block"), 4, **DISTRIBUTED
    ),
}
"""Experts in TEGroupedMLP, each under all kinds of plans."""


FLEX_BACKENDS = ("deepep", "hybridep")


def on_flex(backend, cell, ranks=2, **more):
    """A case whose layers dispatch by these kernels, of which tests have stand-ins."""
    settings = (("moe_flex_dispatcher_backend", backend), *cell.settings)
    return ExecutionCase(dataclasses.replace(cell, dispatcher="flex", settings=settings), ranks, **more)


THREE = with_settings(THREE_PICKS, ep=2, layers=2, packed=True)
FLEX = {
    "ep2": (Cell(ep=2, layers=2), 2, {}, ("planned",)),
    "ep2-tp2, all recomputed": (Cell(ep=2, tp=2, layers=2, recompute="uniform", packed=True), 2, {}, ("random",)),
    "ep2, three picks": (THREE, 2, {}, ("static", "planned")),
    "ep2, grouped, rows without a route": (
        *(Cell(ep=2, layers=2, experts="grouped, fused", recompute="selective"), 2, {"complete": False}),
        ("planned",),
    ),
    "ep4": (Cell(ep=4, layers=2, recompute="selective"), 4, {}, ("random",)),
    "ep2-pp2, all recomputed": (Cell(ep=2, pp=2, layers=2, recompute="uniform", packed=True), 4, {}, ("planned",)),
    "ep2-edp2": (Cell(ep=2, layers=2), 4, {"told": OVERLAP}, ("planned",)),
}
"""Splits under which plans are executed on flex: (cell, ranks, what more the case has, kinds of plans)."""
