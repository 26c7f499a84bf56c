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
    (ExecutionCase(with_settings(shape, ep=2, layers=2, recompute="selective", packed=True)), ("static", "planned"))
    for shape in EXECUTED_SHAPES
]
"""What runs in the same processes: (case, kinds of plans)."""
BY_NIGHT = (*EXECUTED_BY_NIGHT, "grouped, fused, distributed", "grouped, fused, virtual stages")
FLEX_BY_NIGHT = "ep2-pp2-vpp2", "ep4, kept slots"


def by_time(names, by_night, quick=None):
    times = {quick: ()} | dict.fromkeys(by_night, pytest.mark.exhaustive)
    return [pytest.param(name, marks=times.get(name, pytest.mark.slow)) for name in names]


@pytest.mark.parametrize("name", by_time(CASES, BY_NIGHT))
def test_losses_gradients_weights_and_state_equal_those_of_the_static_run(name):
    [ranks] = {case.ranks for case, _ in CASES[name]}
    run("test_replicas_inside.check_cases", CASES[name], ranks=ranks, timeout=900)


@pytest.mark.parametrize("name", by_time(FLEX, FLEX_BY_NIGHT, quick="ep2"))
def test_plans_are_executed_by_kernels_that_are_told_places(name):
    cell, ranks, more, kinds = FLEX[name]
    cases = [(on_flex(backend, cell, ranks, **more), kinds) for backend in FLEX_BACKENDS]
    run("test_flex_plans.check_cases", cases, ranks=ranks, timeout=900)
