"""Plans executed inside Megatron: training goes on as if every expert were at home, and ranks compute what plans say.

One test per split of the model. Two of its 16 variants run in CI, each under one kind of plan; by night all of them
under all kinds, and for a step more.
"""

import itertools

import pytest

from tests.adapters.megatron.forked_ranks import run
from tests.adapters.megatron.grid import (
    EXECUTED,
    EXECUTED_SHAPES,
    GROUPED,
    PLANS,
    RECOMPUTE,
    SAMPLED,
    executed_shape,
    executions_of,
)


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        pytest.param(False, 2, marks=pytest.mark.slow, id="sample"),
        pytest.param(True, 3, marks=pytest.mark.exhaustive, id="every variant"),
    ],
)
@pytest.mark.parametrize("name", EXECUTED)
def test_losses_gradients_weights_and_state_equal_those_of_the_static_run(name, every, steps):
    cases, ranks = executions_of(name, every), EXECUTED[name].ranks
    run("plan_execution_checks.check_cases", cases, steps, ranks=ranks, timeout=900)


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
    run("plan_execution_checks.check_cases", [(GROUPED[name], PLANS)], ranks=GROUPED[name].ranks)


@pytest.mark.slow
def test_layers_of_every_shape_are_executed():
    run("plan_execution_checks.check_cases", [executed_shape(name) for name in EXECUTED_SHAPES], ranks=2)


def test_every_pair_of_values_is_in_the_sample():
    axes = [RECOMPUTE, ("alltoall", "allgather"), (False, True), PLANS]
    for one, other in itertools.combinations(range(len(axes)), 2):
        found = {(row[one], row[other]) for rows in SAMPLED.values() for row in rows}
        assert found == set(itertools.product(axes[one], axes[other]))
    assert SAMPLED.keys() == EXECUTED.keys()
    for rows in SAMPLED.values():
        _, dispatchers, forms, kinds = map(set, zip(*rows, strict=True))
        assert (len(dispatchers), len(forms)) == (2, 2)
        assert kinds != {"static"}


@pytest.mark.parametrize("rows", ["padding_is", pytest.param("rows_without_a_route_are", marks=pytest.mark.slow)])
def test_rows_that_nothing_depends_on_are_spread_by_the_plan(rows):
    run(f"plan_execution_checks.check_{rows}_spread_by_the_plan", ranks=2)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param("check_gradients_lose_nothing_on_their_way_home", marks=pytest.mark.slow),
        "check_checkpoints_do_not_see_replicas",
        "check_modules_of_replicas_are_kept_from_one_execution_to_the_next",
        pytest.param("check_nothing_of_executions_piles_up", marks=pytest.mark.slow),
    ],
)
def test_replicas_leave_gradients_and_checkpoints_as_they_were(check):
    run(f"plan_execution_checks.{check}", ranks=2)
