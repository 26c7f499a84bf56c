"""Experts that change their expert-parallel rank between two steps: training goes on as if nothing had moved."""

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.adapters.megatron.grid import BIASED, Cell, ExecutionCase, with_settings

DEEP_EP = {"moe_flex_dispatcher_backend": "deepep"}
BALANCED = {**BIASED, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
DENSE_FIRST = with_settings({"moe_layer_freq": [0, 1]}, ep=2, layers=2, experts="grouped")
CASES = [
    ExecutionCase(Cell(ep=2, layers=2, dispatcher="allgather", packed=True, recompute="uniform"), 2, "adafactor"),
    ExecutionCase(Cell(ep=2, tp=2, layers=2, packed=True, recompute="selective"), 2, "master weights"),
    ExecutionCase(with_settings(BALANCED, ep=2, layers=2), 2, "float32", replays=False),
    ExecutionCase(with_settings(DEEP_EP, ep=2, layers=2, dispatcher="flex"), 2, "adamw"),
    ExecutionCase(with_settings({"moe_layer_freq": [0, 1]}, ep=2, pp=2, layers=2), 4, "adamw"),
    ExecutionCase(Cell(ep=2, tp=2, layers=1, dispatcher="allgather"), 4, "distributed master weights", replays=False),
]
"""How the model is split, its optimizer, and whether routes are replayed."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_weights_state_and_routes_are_equal_bit_for_bit(case):
    run("test_home_moves.check_moves_change_nothing", case, ranks=case.ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "kind", "ranks"),
    [(Cell(ep=2, layers=2), "float32", 2), (DENSE_FIRST, "distributed master weights", 4)],
    ids=str,
)
def test_distributed_checkpoints_are_in_logical_order(cell, kind, ranks):
    """With keys of all experts together, or for each."""
    run("test_home_checkpoints.check_round_trips", cell, kind, ranks=ranks)
