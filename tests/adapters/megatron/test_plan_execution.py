"""Plans executed inside Megatron: training goes on as if every expert were at home; ranks compute what plans say."""

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.adapters.megatron.grid import FLEX_BACKENDS, GROUPS, OVERLAP, Cell, ExecutionCase
from tests.tiers import grid

PLANS = ("static", "planned", "random")
"""Every expert at its home; the planner's; valid ones of no merit, which also move homes."""


def under(*plans, ranks=2, more=(), **cell):
    """(case, plans) of ranks that share experts in two."""
    return ExecutionCase(Cell(**{"ep": 2, "layers": 2, **cell}), ranks, **dict(more)), plans


GATHERED, PARTLY, OVERLAPPING = {"dispatcher": "allgather"}, {"complete": False}, {"told": OVERLAP}
DISTRIBUTED = {"optimizer": "distributed", **OVERLAPPING}
GATHERING = {**DISTRIBUTED, "told": {**OVERLAP, "overlap_param_gather": True}}
THREE_PICKS = {"moe_router_topk": 3, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
SHAPES = [
    {**THREE_PICKS, "moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True},
    {**GROUPS, "mtp_num_layers": 1},
]
"""Settings of layers, in packed micro-batches: auxiliary losses count padding else."""
CASES = {
    "ep2": [under("planned", packed=True), under("static", recompute="uniform", **GATHERED)],
    "ep2-tp2": [under("static", tp=2), under("random", tp=2, recompute="uniform", packed=True, **GATHERED)],
    "ep2-cp2": [
        under("planned", more=PARTLY, cp=2, recompute="block", packed=True),
        under("planned", more=PARTLY, cp=2, recompute="selective", **GATHERED),
    ],
    "ep2-pp2-vpp2": [
        under("planned", ranks=4, layers=4, pp=2, vpp=2, recompute="uniform"),
        under("random", ranks=4, layers=4, pp=2, vpp=2, packed=True, **GATHERED),
    ],
    "ep2-edp2": [
        under("random", ranks=4, more=OVERLAPPING, recompute="block"),
        under("random", ranks=4, more=DISTRIBUTED, recompute="selective", packed=True),
        under("static", ranks=4, more=DISTRIBUTED, recompute="block", **GATHERED),
        under("planned", ranks=4, more=GATHERING),
    ],
    "grouped": [under(*PLANS, experts="grouped")],
    "grouped, fused": [under(*PLANS, experts="grouped, fused", recompute="selective", packed=True, **GATHERED)],
    "grouped, fused, distributed": [
        under(*PLANS, ranks=4, more=DISTRIBUTED, experts="grouped, fused", recompute="block")
    ],
    "layers of every shape": [
        under("static", "planned", recompute="selective", packed=True, settings=shape) for shape in SHAPES
    ],
}
"""What runs in the same processes."""
BY_NIGHT = "grouped, fused, distributed"
FLEX = {
    "ep2": under("planned"),
    "ep2-tp2, all recomputed": under("random", tp=2, recompute="uniform", packed=True),
    "ep2, three picks": under("static", "planned", packed=True, settings=THREE_PICKS),
    "ep2, grouped, rows without a route": under(
        "planned", more=PARTLY, experts="grouped, fused", recompute="selective"
    ),
    "ep4": under("random", ranks=4, ep=4, recompute="selective"),
    "ep2-pp2, all recomputed": under("planned", ranks=4, pp=2, recompute="uniform", packed=True),
    "ep2-edp2": under("planned", ranks=4, more=OVERLAPPING),
}
"""Splits under which plans are executed on flex."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.exhaustive if each == BY_NIGHT else ()) for each in CASES]
)
def test_losses_gradients_weights_and_state_equal_those_of_the_static_run(name):
    [ranks] = {case.ranks for case, _ in CASES[name]}
    run("test_replicas_inside.check_cases", CASES[name], ranks=ranks, timeout=900)


@grid("name", FLEX, quick=1)
def test_plans_are_executed_by_kernels_that_are_told_places(name):
    case, plans = FLEX[name]
    cases = [(case.on_flex(backend), plans) for backend in FLEX_BACKENDS]
    run("test_flex_plans.check_cases", cases, ranks=case.ranks, timeout=900)
