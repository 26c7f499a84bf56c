"""Experts that change their expert-parallel rank between two steps: training goes on as if nothing had moved."""

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.adapters.megatron.grid import BIASED, Cell, ExecutionCase, with_settings

DEEP_EP, HYBRID_EP = ({"moe_flex_dispatcher_backend": backend} for backend in ("deepep", "hybridep"))
BALANCED = {**BIASED, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
CASES = [
    (ExecutionCase(Cell(ep=2, layers=2), 2, "adamw", replays=False), pytest.mark.exhaustive),
    (ExecutionCase(Cell(ep=2, layers=2, dispatcher="allgather", packed=True, recompute="uniform"), 2, "adafactor"), ()),
    (ExecutionCase(Cell(ep=2, tp=2, layers=2, packed=True, recompute="selective")), pytest.mark.exhaustive),
    (ExecutionCase(with_settings(BALANCED, ep=2, layers=2), 2, "float32", replays=False), pytest.mark.slow),
    (ExecutionCase(with_settings(DEEP_EP, ep=2, layers=2, dispatcher="flex"), 2, "adamw"), pytest.mark.slow),
    (ExecutionCase(with_settings(HYBRID_EP, ep=2, layers=2, dispatcher="flex"), 2, "adamw"), pytest.mark.exhaustive),
    (ExecutionCase(Cell(ep=2, layers=2), 2, "master weights"), pytest.mark.exhaustive),
    (ExecutionCase(Cell(ep=2, layers=2), 4, "distributed"), pytest.mark.exhaustive),
    (ExecutionCase(with_settings({"moe_layer_freq": [0, 1]}, ep=2, pp=2, layers=2), 4, "adamw"), pytest.mark.slow),
    (
        ExecutionCase(
            Cell(ep=2, tp=2, layers=1, dispatcher="allgather"), 4, "distributed master weights", replays=False
        ),
        pytest.mark.slow,
    ),
]
"""How the model is split, its optimizer, and whether routes are replayed; and when that runs."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks) for case, marks in CASES], ids=str)
def test_losses_weights_state_and_routes_are_equal_bit_for_bit(case):
    run("test_home_moves.check_moves_change_nothing", case, ranks=case.ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "cell", "ranks"),
    [
        ({"moe_router_topk": 4}, {"ep": 2, "layers": 2}, 2),
        ({}, {"ep": 2, "tp": 2, "etp": 2, "layers": 1, "dispatcher": "allgather"}, 4),
    ],
    ids=["more picks", "parts of experts"],
)
def test_order_of_sums_is_all_that_changes_with_more_summands(settings, cell, ranks):
    run("test_home_moves.check_sums_are_all_that_differs", settings, cell, ranks=ranks)


@pytest.mark.parametrize(
    ("cell", "kind", "ranks"),
    [
        pytest.param(Cell(ep=2, layers=2), "float32", 2, marks=pytest.mark.slow),
        pytest.param(
            *(Cell(ep=2, tp=2, layers=2, dispatcher="allgather"), "master weights", 2), marks=pytest.mark.exhaustive
        ),
        pytest.param(Cell(ep=2, layers=2), "distributed", 4, marks=pytest.mark.exhaustive),
        pytest.param(
            with_settings({"moe_layer_freq": [0, 1]}, ep=2, layers=2),
            "distributed master weights",
            4,
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_distributed_checkpoints_are_in_logical_order(cell, kind, ranks):
    run("test_home_checkpoints.check_round_trips", cell, kind, ranks=ranks)


@pytest.mark.exhaustive
def test_so_they_are_with_keys_for_each_expert():
    more = {"singleton_local_shards": True}
    run("test_home_checkpoints.check_round_trips", Cell(ep=2, layers=2), "float32", more, ranks=2)
