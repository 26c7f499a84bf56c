"""Plans executed inside Megatron: training goes on as if every expert were at home; ranks compute what plans say."""

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.adapters.megatron.grid import (
    EXECUTED,
    EXECUTED_BY_NIGHT,
    EXECUTED_SHAPES,
    FLEX,
    FLEX_BACKENDS,
    GROUPED,
    PLANS,
    ExecutionCase,
    executions_of,
    on_flex,
    with_settings,
)

CASES = {name: executions_of(name) for name in EXECUTED}
CASES |= {name: [(case, PLANS)] for name, case in GROUPED.items()}
CASES["layers of every shape"] = [
    (ExecutionCase(with_settings(shape, ep=2, layers=2, recompute="selective", packed=True)), ("planned",))
    for shape in EXECUTED_SHAPES.values()
]
"""What runs in the same processes: (case, kinds of plans)."""
BY_NIGHT = (*EXECUTED_BY_NIGHT, "grouped, fused, distributed", "grouped, fused, virtual stages")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if name in BY_NIGHT else pytest.mark.slow) for name in CASES],
)
def test_losses_gradients_weights_and_state_equal_those_of_the_static_run(name):
    [ranks] = {case.ranks for case, _ in CASES[name]}
    run("test_replicas_inside.check_cases", CASES[name], ranks=ranks, timeout=900)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "ep2" else pytest.mark.slow) for name in FLEX])
def test_plans_are_executed_by_kernels_that_are_told_places(name):
    cell, ranks, more, kinds = FLEX[name]
    cases = [(on_flex(backend, cell, ranks, **more), kinds) for backend in FLEX_BACKENDS]
    run("test_flex_plans.check_cases", cases, ranks=ranks, timeout=900)
