"""Plans executed inside Megatron: training goes on as if every expert were at home, and ranks compute what plans say.

One test per split of the model. Two of its 16 variants run in CI, of most splits, each under one kind of plan; by
night all of them under all kinds, and for a step more.
"""

import itertools

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.adapters.megatron.grid import (
    EXECUTED,
    EXECUTED_SHAPES,
    FLEX,
    FLEX_BACKENDS,
    GROUPED,
    PLANS,
    RECOMPUTE,
    SAMPLED,
    executed_shape,
    executions_of,
    on_flex,
)


@pytest.mark.parametrize(
    ("name", "every", "steps"),
    [
        *(pytest.param(name, False, 2, marks=pytest.mark.slow, id=f"{name}-sample") for name in SAMPLED),
        *(pytest.param(name, True, 3, marks=pytest.mark.exhaustive, id=f"{name}-every variant") for name in EXECUTED),
    ],
)
def test_losses_gradients_weights_and_state_equal_those_of_the_static_run(name, every, steps):
    cases, ranks = executions_of(name, every), EXECUTED[name].ranks
    run("test_replicas_inside.check_cases", cases, steps, ranks=ranks, timeout=900)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("grouped", marks=pytest.mark.slow),
        pytest.param("grouped, fused", marks=pytest.mark.slow),
        pytest.param("grouped, distributed", marks=pytest.mark.exhaustive),
        pytest.param("grouped, fused, distributed", marks=pytest.mark.exhaustive),
        pytest.param("grouped, fused, virtual stages", marks=pytest.mark.exhaustive),
    ],
)
def test_experts_in_one_module_are_executed(name):
    run("test_replicas_inside.check_cases", [(GROUPED[name], PLANS)], ranks=GROUPED[name].ranks)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "ep2" else pytest.mark.slow) for name in FLEX])
def test_plans_are_executed_by_kernels_that_are_told_places(name):
    cell, ranks, more, kinds = FLEX[name]
    cases = [(on_flex(backend, cell, ranks, **more), kinds) for backend in FLEX_BACKENDS]
    run("test_flex_plans.check_cases", cases, ranks=ranks, timeout=900)


@pytest.mark.slow
def test_layers_of_every_shape_are_executed():
    run("test_replicas_inside.check_cases", [executed_shape(name) for name in EXECUTED_SHAPES], ranks=2)


def test_every_pair_of_values_is_in_the_sample():
    axes = [RECOMPUTE, ("alltoall", "allgather"), (False, True), PLANS]
    for one, other in itertools.combinations(range(len(axes)), 2):
        found = {(row[one], row[other]) for rows in SAMPLED.values() for row in rows}
        assert found == set(itertools.product(axes[one], axes[other]))
    assert SAMPLED.keys() == EXECUTED.keys() - {"ep4", "ep2-pp2"}
    for rows in SAMPLED.values():
        _, dispatchers, forms, kinds = map(set, zip(*rows, strict=True))
        assert (len(dispatchers), len(forms)) == (2, 2)
        assert kinds != {"static"}
