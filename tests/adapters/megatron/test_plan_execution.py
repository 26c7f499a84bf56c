"""Plans executed inside Megatron: training goes on as if every expert were at home; ranks compute what plans say."""

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.adapters.megatron.grid import (
    EXECUTED,
    EXECUTED_SHAPES,
    FLEX,
    FLEX_BACKENDS,
    GROUPED,
    PLANS,
    ExecutionCase,
    on_flex,
    with_settings,
)
from tests.tiers import grid

CASES = EXECUTED | {name: [(case, PLANS)] for name, case in GROUPED.items()}
CASES["layers of every shape"] = [
    (ExecutionCase(with_settings(shape, ep=2, layers=2, recompute="selective", packed=True)), ("static", "planned"))
    for shape in EXECUTED_SHAPES
]
"""What runs in the same processes: (case, kinds of plans)."""
BY_NIGHT = "grouped, fused, distributed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.exhaustive if each == BY_NIGHT else ()) for each in CASES]
)
def test_losses_gradients_weights_and_state_equal_those_of_the_static_run(name):
    [ranks] = {case.ranks for case, _ in CASES[name]}
    run("test_replicas_inside.check_cases", CASES[name], ranks=ranks, timeout=900)


@grid("name", FLEX, quick=1)
def test_plans_are_executed_by_kernels_that_are_told_places(name):
    cell, ranks, more, kinds = FLEX[name]
    cases = [(on_flex(backend, cell, ranks, **more), kinds) for backend in FLEX_BACKENDS]
    run("test_flex_plans.check_cases", cases, ranks=ranks, timeout=900)
