"""Training with experts that move between steps, beside the same training without: what is equal, and what is seen."""

import dataclasses
from unittest import mock

import pytest

from foreroute.adapters.megatron import expert_parameters, planned_experts
from foreroute.ep.transfer.home_moves import MovingLayer
from tests.adapters.megatron.executed_plans import furthest, trained
from tests.adapters.megatron.forked_ranks import on_ranks
from tests.adapters.megatron.grid import Cell, ExecutionCase
from tests.trainers.verl import flex_kernels  # noqa: F401  # of DeepEP and HybridEP, which the flex dispatcher takes

STEPS = 4


def check_moves_change_nothing(case):
    # padding that is spread goes evenly to places, so that it goes elsewhere when homes move
    case = dataclasses.replace(case, padding="native")
    fixed, moved = (trained(case, planned, steps=STEPS) for planned in (None, "moved"))
    assert (fixed["moved"], moved["moved"] > 0) == (0, True)
    assert fixed["traces"] == moved["traces"]
    apart = furthest(moved, fixed)
    assert max(apart.values()) == 0, apart


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
