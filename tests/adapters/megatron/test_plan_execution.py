"""Plans executed inside Megatron: training goes on as if every expert were at home, and ranks compute what plans say.

One test per split of the model. Four of its 16 variants run by default, each under one kind of plan;
`make night PART=megatron` runs all of them under all kinds, and for a step more.
"""

import itertools
import os

import pytest

from tests.adapters.megatron.forked_ranks import checks_of, run
from tests.adapters.megatron.grid import (
    EXECUTED,
    EXECUTED_SHAPES,
    GROUPED,
    OVERLAP,
    PLANS,
    Cell,
    ExecutionCase,
    executed_shape,
    executions_of,
)

EVERY = "FOREROUTE_MEGATRON_GRID" in os.environ


@pytest.mark.slow
@pytest.mark.parametrize("name", EXECUTED)
def test_losses_gradients_weights_and_state_equal_those_of_the_static_run(name):
    steps, ranks = 3 if EVERY else 2, EXECUTED[name].ranks
    run("plan_execution_checks.check_cases", executions_of(name, EVERY), steps, ranks=ranks, timeout=900)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("grouped", marks=pytest.mark.slow),
        "grouped, fused",
        pytest.param("grouped, distributed", marks=pytest.mark.exhaustive),
        pytest.param("grouped, fused, distributed", marks=pytest.mark.slow),
        pytest.param("grouped, fused, virtual stages", marks=pytest.mark.slow),
    ],
)
def test_experts_in_one_module_are_executed(name):
    run("plan_execution_checks.check_cases", [(GROUPED[name], PLANS)], ranks=GROUPED[name].ranks)


@pytest.mark.slow
def test_layers_of_every_shape_are_executed():
    run("plan_execution_checks.check_cases", [executed_shape(name) for name in EXECUTED_SHAPES], ranks=2)


@pytest.mark.parametrize(
    "case",
    [
        ExecutionCase(Cell(ep=2, layers=2, packed=True, recompute="selective")),
        pytest.param(
            ExecutionCase(Cell(ep=2, layers=2, packed=True), 4, "distributed", OVERLAP), marks=pytest.mark.slow
        ),
        pytest.param(
            ExecutionCase(Cell(ep=4, layers=2, packed=True, dispatcher="allgather"), 4), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_homes_move_in_every_step_and_replicas_serve_beside_them(case):
    run("plan_execution_checks.check_homes_move_and_replicas_serve", [case], ranks=case.ranks, timeout=300)


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
        pytest.param(
            "check_gradients_that_are_dropped_doubled_or_of_slots_that_were_not_refilled", marks=pytest.mark.slow
        ),
        pytest.param("check_fused_gradients_and_those_sent_through_autograd", marks=pytest.mark.slow),
        pytest.param("check_experts_in_one_module", marks=pytest.mark.slow),
        "check_an_expert_that_is_looked_for_in_the_slot_of_another",
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


@pytest.mark.parametrize("rows", ["padding_is", "rows_without_a_route_are"])
def test_rows_that_nothing_depends_on_are_spread_by_the_plan(rows):
    run(f"plan_execution_checks.check_{rows}_spread_by_the_plan", ranks=2)


def test_wrong_counts_end_all_ranks_with_one_error():
    run("known_count_checks.check_wrong_counts_end_all_ranks_alike", ranks=2)


def test_a_rank_that_brings_other_routes_ends_the_others():
    """It alone can know, since no rank asks another within a schedule."""
    wrong, other = run("known_count_checks.brings_other_routes", ranks=2, dying={0})
    assert wrong[0] == "CountsError"
    assert "micro-batch 0 brings other routes" in wrong[1]
    assert other is not None
    assert other[0] in ("RuntimeError", "DistBackendError", "TransferError"), other


def test_no_rank_asks_another_on_the_host_within_a_schedule():
    run("known_count_checks.check_no_rank_asks_another_on_the_host_within_a_schedule", ranks=2)


@pytest.mark.slow
def test_what_one_stage_objects_to_ends_all_ranks_with_one_error():
    run("known_count_checks.check_what_one_stage_objects_to_ends_all", ranks=4)


test_refusals = checks_of("refused_execution_checks", ranks=2)


@pytest.mark.parametrize(
    "check",
    [
        "check_gradients_lose_nothing_on_their_way_home",
        "check_a_model_that_nothing_wraps",
        "check_checkpoints_do_not_see_replicas",
        "check_nothing_fetched_is_kept_for_backward",
        "check_nothing_of_executions_piles_up",
    ],
)
def test_replicas_leave_gradients_and_checkpoints_as_they_were(check):
    run(f"plan_execution_checks.{check}", ranks=2)


def test_fetches_are_begun_ahead_in_the_order_of_the_step_before():
    splits = [{"ep": 2, "layers": 2}, {"ep": 2, "layers": 2, "recompute": "uniform", "dispatcher": "allgather"}]
    run("fetch_order_checks.check_steps_after_the_first_fetch_ahead", splits, ranks=2)


def test_weights_stand_behind_the_rows_of_their_cell():
    run(
        "fetch_order_checks.check_weights_stand_behind_the_rows_of_their_cell",
        ["none", "selective", "uniform"],
        ranks=2,
    )


def test_executions_that_take_turns_fetch_ahead():
    run("fetch_order_checks.check_forward_only_and_updates_take_turns", ranks=2)


def test_steps_of_other_numbers_of_micro_batches_are_executed():
    run("fetch_order_checks.check_steps_of_other_numbers_of_micro_batches", ranks=2)


@pytest.mark.slow
def test_fetches_are_begun_ahead_between_pipeline_stages():
    splits = [{"ep": 2, "layers": 4, "pp": 2}, {"ep": 2, "layers": 4, "pp": 2, "vpp": 2, "recompute": "selective"}]
    run("fetch_order_checks.check_steps_after_the_first_fetch_ahead", splits, ranks=4)


def test_every_visit_gets_the_replicas_of_its_own_cell():
    run("fetch_order_checks.check_every_visit_gets_its_own_cell")


test_columns = checks_of("column_checks")
