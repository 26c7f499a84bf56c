"""Experts that change their expert-parallel rank between two steps: training goes on as if nothing had moved."""

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.adapters.megatron.grid import BIASED, Cell, ExecutionCase, with_settings

DEEP_EP, HYBRID_EP = ({"moe_flex_dispatcher_backend": backend} for backend in ("deepep", "hybridep"))
BALANCED = {**BIASED, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
SLOW, BY_NIGHT = pytest.mark.slow, pytest.mark.exhaustive
CASES = [
    (ExecutionCase(Cell(ep=2, layers=2, dispatcher="allgather", packed=True, recompute="uniform"), 2, "adafactor"), ()),
    (ExecutionCase(Cell(ep=2, tp=2, layers=2, packed=True, recompute="selective")), BY_NIGHT),
    (ExecutionCase(with_settings(BALANCED, ep=2, layers=2), 2, "float32", replays=False), SLOW),
    (ExecutionCase(with_settings(DEEP_EP, ep=2, layers=2, dispatcher="flex"), 2, "adamw"), SLOW),
    (ExecutionCase(with_settings(HYBRID_EP, ep=2, layers=2, dispatcher="flex"), 2, "adamw"), BY_NIGHT),
    (ExecutionCase(Cell(ep=2, layers=2, experts="grouped"), 2, "master weights"), BY_NIGHT),
    (ExecutionCase(Cell(ep=2, layers=2), 4, "distributed"), BY_NIGHT),
    (ExecutionCase(with_settings({"moe_layer_freq": [0, 1]}, ep=2, pp=2, layers=2), 4, "adamw"), SLOW),
    (
        ExecutionCase(
            Cell(ep=2, tp=2, layers=1, dispatcher="allgather"), 4, "distributed master weights", replays=False
        ),
        SLOW,
    ),
]
"""How the model is split, its optimizer, and whether routes are replayed; and when that runs."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks) for case, marks in CASES], ids=str)
def test_losses_weights_state_and_routes_are_equal_bit_for_bit(case):
    run("test_home_moves.check_moves_change_nothing", case, 0.0, ranks=case.ranks)


@pytest.mark.slow
def test_order_of_sums_is_all_that_changes_with_parts_of_experts():
    """A token's experts are added up in the order of slots, which two summands cannot tell and four can."""
    case = ExecutionCase(Cell(ep=2, tp=2, etp=2, layers=1, dispatcher="allgather"), 4, replays=False)
    run("test_home_moves.check_moves_change_nothing", case.in_float64(), 1e-12, ranks=4)


@pytest.mark.parametrize(
    ("cell", "kind", "ranks", "more"),
    [
        pytest.param(Cell(ep=2, layers=2), "float32", 2, (), marks=SLOW),
        pytest.param(Cell(ep=2, tp=2, layers=2, dispatcher="allgather"), "master weights", 2, (), marks=BY_NIGHT),
        pytest.param(Cell(ep=2, layers=2, experts="grouped"), "distributed", 4, (), marks=BY_NIGHT),
        pytest.param(
            with_settings({"moe_layer_freq": [0, 1]}, ep=2, layers=2, experts="grouped"),
            "distributed master weights",
            4,
            (),
            marks=SLOW,
        ),
        pytest.param(
            *(with_settings({"moe_layer_freq": [0, 1]}, ep=2, layers=2), "distributed master weights", 4, ()),
            marks=BY_NIGHT,
        ),
        pytest.param(Cell(ep=2, layers=2), "float32", 2, {"singleton_local_shards": True}, marks=BY_NIGHT),
    ],
    ids=str,
)
def test_distributed_checkpoints_are_in_logical_order(cell, kind, ranks, more):
    """With keys of all experts together, or for each."""
    run("test_home_checkpoints.check_round_trips", cell, kind, more, ranks=ranks)
