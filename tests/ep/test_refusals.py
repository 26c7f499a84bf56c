"""What cannot be executed ends with the same error on every rank, before any row is sent where that can be known."""

import tomllib
from pathlib import Path

import pytest
import torch

from foreroute.ep.compute import LEAST_TORCH
from foreroute.testing.ranks import Workers
from tests.ep import refusal_worker

EARLY = {
    "other_world_size": ("PlanError", "the plan is for 4 ranks, and 2 are here"),
    "plans_differ": ("PlanError", "ranks hold different plans"),
    "no_plan_on_one_rank": ("PlanError", "rank 1: the plan is None; expected a plan or the path of its file"),
    "a_number_for_a_plan_on_one_rank": ("PlanError", "rank 1: the plan is 5; expected a plan or the path of its file"),
    "a_number_for_traces_on_one_rank": (
        "PlanError",
        "rank 1: what was planned is given as 5; expected counts or traces",
    ),
    "other_homes": ("PlanError", "by the plan; move homes first"),
    "other_layers": ("PlanError", "the plan is for 2 routed layers of 8 experts, the model has 3 of 8"),
    "other_counts_on_one_rank": ("CountsError", "rank 1: counts have digest"),
    "counts_of_another_shape": ("CountsError", "counts are [1, 3, 2, 8], the plan is for [2, 3, 2, 8]"),
    "gathered_of_other_micro_steps": ("CountsError", "rank 0: int64 [1, 3, 8]; rank 1: int64 [2, 3, 8]"),
    "gathered_of_other_experts": ("CountsError", "int64 [2, 3, 4]); expected integers [micro-steps, 3, 8]"),
    "gathered_of_shares": ("CountsError", "float64 [2, 3, 8]); expected integers"),
    "no_plan": ("PlanError", "no plan is in force: call begin_step"),
    "another_micro_batch_on_one_rank": ("CountsError", "rank 1: its rows of micro-step 0 make"),
    "other_micro_steps": ("PlanError", "ranks begin micro-steps 0 to 1 of a plan that has 2"),
    "no_such_micro_step": ("PlanError", "ranks begin micro-steps 2 to 2 of a plan that has 2"),
    "live_routes_of_other_counts": ("CountsError", "step 0, micro-step 0, routed layer 0: rank"),
    "live_routes_of_other_counts_with_the_plan_alone": ("CountsError", "by the plan, which was made for other counts"),
    "rows_of_another_batch": ("CountsError", "make it from the batch that the model is called with"),
    "no_forward": ("ReplayError", "was not executed: no forward of the model ran"),
    "checkpointed_by_hand": ("ReplayError", "runs inside torch.utils.checkpoint called by hand"),
    "checkpointed_by_hand_reentrant": ("ReplayError", "runs inside torch.utils.checkpoint called by hand"),
    "state_of_a_shard": ("PlacementError", "holds only the experts that live on this rank"),
    "state_of_one_rank": ("PlacementError", "down_proj has 4 experts, expected all 8 in order of their ids"),
    "state_into_a_shard": ("PlacementError", "holds only the experts that live on this rank"),
}
LATE = {
    "more_to_replicas_than_there_is": ("PlanError", "more than there are; the plan was made for other counts"),
    "routers_free_though_routes_were_announced": ("CountsError", "routers made other assignments than"),
    "and_another_micro_step_begins": ("CountsError", "routers made other assignments than"),
    "and_another_step_begins": ("CountsError", "routers made other assignments than"),
    "two_forwards": ("ReplayError", "runs a second time in step 0, micro-step 0, routed layer 0"),
}


@pytest.fixture(scope="module")
def executions(workers):
    return workers(2).run(refusal_worker.executions)


@pytest.mark.parametrize("name", [*EARLY, *LATE])
def test_every_rank_ends_with_the_same_error_and_goes_on(executions, name):
    kind, message = {**EARLY, **LATE}[name]
    for outcomes in executions:
        (found, text, all_to_alls), right = outcomes[name]
        assert (found, message in text) == (kind, True), (found, text)
        assert all_to_alls == 0 or name in LATE
        assert right == ("nothing", "", 6)


ATTACHED = {
    "other_weights": ("AttachError", "ranks differ in model.embed_tokens.weight"),
    "frozen_on_one_rank": ("AttachError", "ranks differ in model.layers.1.mlp.experts.down_proj"),
    "indivisible": ("TopologyError", "7 experts cannot be placed evenly on 2 ranks"),
    "twice": ("AttachError", "is distributed already"),
    "forward_of_others": ("AttachError", "model.layers.1.mlp.experts has a forward of its own"),
    "undeclared_layout": ("AttachError", "whose layout transformers does not declare"),
    "older_torch": (
        "AttachError",
        "has no torch.nn.functional.grouped_mm, which experts on several ranks are computed",
    ),
    "no_experts": ("AttachError", "has no experts modules"),
    "dtensor": ("AttachError", "model.layers.1.mlp.experts.down_proj is a DTensor"),
    "parametrized": ("AttachError", "has parametrized weights"),
    "learnt_activation": ("AttachError", "has a PReLU, an activation that is learnt"),
    "lora": ("AttachError", "is wrapped by a ParamWrapper"),
    "meta": ("AttachError", "is on the meta device"),
    "other_parameter": ("AttachError", "model.layers.1.mlp.experts.scale is torch.float32 [8]"),
    "in_a_session": ("AttachError", "session is open on this model"),
    "uneven_homes": ("TopologyError", "rank 0: in layer 0, rank 0 is home to 8 experts; expected 4 on every rank"),
    "indivisible_on_one_rank": ("TopologyError", "rank 1: 7 experts cannot be placed evenly on 2 ranks"),
    "no_experts_on_one_rank": ("AttachError", "rank 0: Qwen3MoeAttention has no experts modules"),
    "uneven_homes_on_one_rank": ("TopologyError", "rank 1: in layer 0, rank 0 is home to 5 experts; expected 4"),
    "tied_experts": (
        "AttachError",
        "model.layers.0.mlp.experts.down_proj and model.layers.2.mlp.experts.down_proj are",
    ),
    "shared_experts_module": ("AttachError", "model.layers.2.mlp.experts.gate_up_proj are one parameter"),
    "tied_to_a_dense_parameter": ("AttachError", "model.layers.1.mlp.experts.down_proj and heads.0 are one parameter"),
    "other_buffer": ("AttachError", "mlp.gate.e_score_correction_bias"),
    "experts_in_another_order": ("AttachError", "ranks differ in model.layers.1.mlp.experts.down_proj"),
}


@pytest.fixture(scope="module")
def attached(workers):
    return workers(2).run(refusal_worker.attaching)


@pytest.mark.parametrize("name", ATTACHED)
def test_models_that_cannot_be_spread_are_refused_by_name(attached, name):
    kind, message = ATTACHED[name]
    assert attached[0][name] == attached[1][name]
    for errors in attached:
        found, text = errors[name]
        assert (found, message in text) == (kind, True), (found, text)


def test_what_is_installed_is_what_experts_are_computed_with():
    """The release asks for a torch that has what the code calls."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [line for extra in project["optional-dependencies"].values() for line in extra if line.startswith("torch")]
    assert asked == [f"torch>={LEAST_TORCH}"] * 2
    assert hasattr(torch.nn.functional, "grouped_mm")
    assert tuple(map(int, torch.__version__.split(".")[:2])) >= tuple(map(int, LEAST_TORCH.split(".")))


def test_a_process_that_dies_ends_the_others_with_the_cell_they_waited_in():
    group = Workers(2, timeout_s=120)
    try:
        left, gone = group.outcomes(refusal_worker.forward_without_a_rank, 1)
    finally:
        group.close()
    assert gone is None
    assert left.kind == "TransferError"
    assert "the counts of routed layer 2: rank 0 waited" in left.message
