"""Plans executed inside Megatron: training goes on as if every expert were at home, and ranks compute what plans say.

One test per split of the model. Four of its 16 variants run by default, each under one kind of plan;
`make test-megatron-grid` runs all of them under all kinds.
"""

import itertools
import os

import pytest

from tests.adapters.megatron.forked_ranks import checks_of, run
from tests.adapters.megatron.grid import EXECUTED, PLANS, executions_of

EVERY = "FOREROUTE_MEGATRON_GRID" in os.environ


@pytest.mark.slow
@pytest.mark.parametrize("name", EXECUTED)
def test_losses_gradients_weights_and_state_equal_those_of_the_static_run(name):
    run("plan_execution_checks.check_cases", executions_of(name, EVERY), ranks=EXECUTED[name].ranks, timeout=900)


def test_every_pair_of_values_is_among_the_ordinary_cases():
    cases = [(case, kind) for name in EXECUTED for case, kinds in executions_of(name, False) for kind in kinds]
    values = {
        "split": [str((case.cell.split, case.ranks, case.optimizer)) for case, _ in cases],
        "recompute": [case.cell.recompute for case, _ in cases],
        "dispatcher": [case.cell.dispatcher for case, _ in cases],
        "packed": [case.cell.packed for case, _ in cases],
        "plan": [kind for _, kind in cases],
    }
    assert set(values["plan"]) == set(PLANS)
    for one, other in itertools.combinations(values, 2):
        wanted = set(itertools.product(values[one], values[other]))
        assert set(zip(values[one], values[other], strict=True)) == wanted, (one, other)


@pytest.mark.parametrize(
    "check",
    [
        "check_gradients_that_are_dropped_doubled_or_of_slots_that_were_not_refilled",
        "check_fused_gradients_and_those_sent_through_autograd",
    ],
)
def test_a_wrong_way_is_seen_on_two_ranks(check):
    run(f"execution_control_checks.{check}", ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        "check_gradients_that_are_late_for_their_bucket",
        "check_the_key_of_the_latest_forward",
        "check_weights_that_are_sent_before_they_are_gathered",
    ],
)
def test_a_wrong_way_is_seen_on_four_ranks(check):
    run(f"execution_control_checks.{check}", ranks=4)


def test_counts_are_known_ahead():
    run("known_count_checks.check_exchanges_and_waits", ranks=2)


def test_wrong_counts_end_all_ranks_with_one_error():
    run("known_count_checks.check_wrong_counts_end_all_ranks_alike", ranks=2)


def test_layers_that_cannot_execute_plans_are_refused():
    run("known_count_checks.check_layers_that_cannot_execute_plans", ranks=2)


test_columns = checks_of("column_checks")
