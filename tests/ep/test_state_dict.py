"""A placed model as a whole: its weights, its homes, its gradients, and the models beside it."""

import pytest
import torch

from tests.ep import state_dict_worker

WITHIN = 1e-12
"""In float64, whose rounding is 1.1e-16: sums of some thousand numbers in another order."""


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_state_is_in_logical_order_whatever_the_homes(workers, family):
    assert workers(2).run(state_dict_worker.shuffled, family) == [(True, True)] * 2


def test_homes_move_between_steps_and_change_nothing(workers):
    stay, move = (workers(2).run(state_dict_worker.moved_between_steps, moves) for moves in (False, True))
    for (expected, none), (found, received) in zip(stay, move, strict=True):
        assert (none, received > 0) == (0, True)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_homes_are_a_copy_of_those_handed_in(workers):
    assert workers(2).run(state_dict_worker.homes_changed_after_the_move) == [("int16", True)] * 2


def test_clipping_is_by_the_norm_of_the_whole_model(workers):
    for (norm, expected), worst in workers(2).run(state_dict_worker.clipped):
        assert norm == pytest.approx(expected, rel=WITHIN)
        assert expected > 0.1
        assert worst < WITHIN


def test_a_parameter_used_on_one_rank_has_a_gradient_on_all_and_one_used_on_none_has_none(workers):
    assert workers(2).run(state_dict_worker.unused_on_one_rank) == [([1.0], True)] * 2


def test_other_models_of_the_same_configuration_never_notice(workers):
    for untouched, difference in workers(2).run(state_dict_worker.beside_a_plain_model):
        assert untouched
        assert difference < WITHIN


def test_frozen_experts_under_replicas(workers):
    assert max(workers(2).run(state_dict_worker.frozen_experts)) < WITHIN


def test_recompute_and_update_run_the_same_cells(workers):
    for losses in workers(2).run(state_dict_worker.recomputed_and_updated):
        assert len(set(losses)) == 1


def test_groups_of_ranks_beside_each_other(workers):
    assert max(workers(4).run(state_dict_worker.two_groups)) < WITHIN


def test_padding_that_is_not_sent_changes_no_token(workers):
    for difference, tokens_alone in workers(2).run(state_dict_worker.padding):
        assert difference < WITHIN
        assert tokens_alone
