"""Training with experts that move between steps, beside the same training without: what is equal, and what is seen."""

import dataclasses
from unittest import mock

import pytest

from foreroute.adapters.megatron import expert_parameters, planned_experts
from foreroute.ep.transfer.home_moves import MovingLayer
from tests.adapters.megatron.executed_plans import furthest, trained
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import BIASED, OVERLAP, Cell, ExecutionCase
from tests.trainers.verl import flex_kernels  # noqa: F401  # of DeepEP and HybridEP, which the flex dispatcher takes

BALANCED = {**BIASED, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
CASES = [
    ExecutionCase(Cell(ep=2, layers=2, dispatcher="allgather", packed=True, recompute="uniform"), 2, "adafactor"),
    ExecutionCase(Cell(ep=2, tp=2, layers=2, packed=True, recompute="selective"), 2, "master weights"),
    ExecutionCase(Cell(ep=2, layers=2, settings=BALANCED), 2, "float32", replays=False),
    ExecutionCase(Cell(ep=2, layers=2), 2, "adamw").on_flex("deepep"),
    ExecutionCase(Cell(ep=2, pp=2, layers=2, settings={"moe_layer_freq": [0, 1]}), 4, "adamw"),
    ExecutionCase(Cell(ep=2, tp=2, layers=1), 4, "distributed master weights", OVERLAP, replays=False),
]
"""How the model is split, its optimizer, and whether routes are replayed. In the last, ranks hold parts of weights."""


@pytest.mark.slow
@on_ranks(2)
def test_losses_weights_state_and_routes_are_equal_bit_for_bit():
    check_moves_change_nothing(2)


@pytest.mark.slow
@on_ranks(4)
def test_so_they_are_on_stages_and_under_a_distributed_optimizer():
    check_moves_change_nothing(4)


def check_moves_change_nothing(ranks):
    for case in (case for case in CASES if case.ranks == ranks):
        # padding that is spread goes evenly to places, so that it goes elsewhere when homes move
        case = dataclasses.replace(case, padding="native")
        fixed, moved = (trained(case, planned, steps=4) for planned in (None, "moved"))
        assert (fixed["moved"], moved["moved"] > 0) == (0, True)
        assert fixed["traces"] == moved["traces"]
        apart = furthest(moved, fixed)
        assert max(apart.values()) == 0, (str(case), apart)


@pytest.mark.slow
@on_ranks(2)
def test_the_comparison_sees_what_stays_behind():
    """State that stays behind, weights that do, and tokens that are sent where experts were, after one move."""
    case = ExecutionCase(Cell(ep=2, layers=2, packed=True), optimizer="adamw")
    inner = expert_parameters.held_tensors
    breaks = {
        "state stays": mock.patch.object(expert_parameters, "held_tensors", lambda expert, state: inner(expert, {})),
        "weights stay": mock.patch.object(MovingLayer, "commit"),
        "tokens go where experts were": mock.patch.object(planned_experts, "set_home"),
    }
    fixed = trained(case, None, steps=3)
    for name, broken in breaks.items():
        with broken:
            apart = furthest(trained(case, "moved", steps=3), fixed)
        assert apart["losses"] > 0, f"{name}: {apart}"
