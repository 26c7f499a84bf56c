"""What cannot be executed ends with the same error on every rank, before any row is sent where that can be known."""

import tomllib
from pathlib import Path

import pytest
import torch

from foreroute.ep.compute import LEAST_TORCH
from foreroute.testing.ranks import Workers
from tests.ep import refusal_worker
from tests.ep.refusal_worker import ATTACHED, EXECUTED


@pytest.fixture(scope="module")
def executions(workers):
    return workers(2).run(refusal_worker.executions)


@pytest.mark.parametrize("name", EXECUTED)
def test_every_rank_ends_with_the_same_error_and_goes_on(executions, name):
    expected = EXECUTED[name]
    for outcomes in executions:
        (found, text, all_to_alls), right = outcomes[name]
        assert (found, expected.message in text) == (expected.kind, True), (found, text)
        assert all_to_alls == 0 or expected.is_late
        assert right == ("nothing", "", 6)


@pytest.fixture(scope="module")
def attached(workers):
    return workers(2).run(refusal_worker.attaching)


@pytest.mark.parametrize("name", ATTACHED)
def test_models_that_cannot_be_spread_are_refused_by_name(attached, name):
    expected = ATTACHED[name]
    assert attached[0][name] == attached[1][name]
    for errors in attached:
        found, text = errors[name]
        assert (found, expected.message in text) == (expected.kind, True), (found, text)


def test_what_is_installed_is_what_experts_are_computed_with():
    """The release asks for a torch that has what the code calls."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [line for extra in project["optional-dependencies"].values() for line in extra if line.startswith("torch")]
    assert asked == [f"torch>={LEAST_TORCH}"] * 2
    assert hasattr(torch.nn.functional, "grouped_mm")
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= tuple(map(int, LEAST_TORCH.split(".")))


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others_with_the_cell_they_waited_in():
    group = Workers(2, timeout_s=120)
    try:
        left, gone = group.outcomes(refusal_worker.forward_without_a_rank, 1)
    finally:
        group.close()
    assert gone is None
    assert left.kind == "TransferError"
    assert "the counts of routed layer 2: rank 0 waited" in left.message


@pytest.mark.slow
def test_a_rank_that_begins_another_micro_step_ends_the_others():
    """It alone can know, since no rank asks another while a step runs."""
    group = Workers(2, timeout_s=120)
    try:
        other, wrong = group.outcomes(refusal_worker.out_of_order)
    finally:
        group.close()
    assert (wrong.kind, "micro-step 1 begins after 0 of 2" in wrong.message) == ("PlanError", True)
    assert other.kind == "TransferError"
    assert "tokens of step 0, micro-step 0, routed layer 0" in other.message


def test_no_rank_asks_another_on_the_host_while_a_step_runs(workers):
    assert workers(2).run(refusal_worker.questions) == [(0, 1)] * 2


def test_all_ranks_say_when_one_does_not_know_its_routes_ahead(workers):
    for known, unknown in workers(2).run(refusal_worker.exchanges_told):
        assert known == []
        assert len(unknown) == 1
        assert unknown[0].startswith("in 2 of 2 micro-steps some rank sends rows that the plan has not counted")
